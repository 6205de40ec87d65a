/* Vectors of float32 numbers, for the kernels in this folder: those of the compiler (GCC and Clang), as wide as the
   processor has. GCC keeps wider ones in memory.

   All loops over floats use them, remainders included, and the compiler vectorizes nothing itself (`FAST_FLAGS` of
   c_compiler.py). It would compile a scalar loop twice, and run the version without vectors, in which it fuses other
   products and sums, where results lie close to inputs: the last bit would depend on where the allocator put a tensor.
   */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define LINE 16 /* numbers of a line of the cache */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline vec load(const float *x) { vec v; memcpy(&v, x, sizeof v); return v; }
static inline void store(float *x, vec v) { memcpy(x, &v, sizeof v); }
static inline vec all(float x) { return x - (vec){0}; }
static inline vec select(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

/* Lets the compiler keep a vector in a register. GCC reads it from memory again in each product else, and the processor
   reads fewer vectors than it multiplies */
#if LANES == 16
#define IN_REGISTER(V) __asm__("" : "+v"(V))
#elif defined(__SSE__)
#define IN_REGISTER(V) __asm__("" : "+x"(V))
#else
#define IN_REGISTER(V) (void)(V)
#endif

/* a > b ? a : b and a < b ? a : b, so b where one of them is NaN. The compiler does not know that one instruction does it
 */
#if LANES == 16
static inline vec larger(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec smaller(vec a, vec b) { return _mm512_min_ps(a, b); }
#elif LANES == 8
static inline vec larger(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec smaller(vec a, vec b) { return _mm256_min_ps(a, b); }
#elif defined(__SSE__)
static inline vec larger(vec a, vec b) { return _mm_max_ps(a, b); }
static inline vec smaller(vec a, vec b) { return _mm_min_ps(a, b); }
#else
static inline vec larger(vec a, vec b) { return select(a > b, a, b); }
static inline vec smaller(vec a, vec b) { return select(a < b, a, b); }
#endif

#if LANES == 8
/* the first n lanes */
static inline ivec first_lanes(int64_t n) {
  static const int32_t masks[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1};
  ivec mask;
  memcpy(&mask, masks + LANES - n, sizeof mask);
  return mask;
}
#endif

/* the first n <= LANES numbers, and `rest` behind them */
static inline vec load_some(const float *x, int64_t n, float rest) {
#if LANES == 16
  return _mm512_mask_loadu_ps(all(rest), (1 << n) - 1, x);
#elif LANES == 8
  ivec mask = first_lanes(n);
  return select(mask, _mm256_maskload_ps(x, (__m256i)mask), all(rest));
#else
  float part[LANES];
  for (int i = 0; i < LANES; i++) part[i] = rest;
  memcpy(part, x, n * sizeof(float));
  return load(part);
#endif
}

static inline void store_some(float *x, vec v, int64_t n) {
#if LANES == 16
  _mm512_mask_storeu_ps(x, (1 << n) - 1, v);
#elif LANES == 8
  /* AMD's processors take longer for a store with a mask */
  __m128 part = _mm256_castps256_ps128(v);
  if (n == LANES) _mm256_storeu_ps(x, v);
  if (n & 4) _mm_storeu_ps(x, part), x += 4, part = _mm256_extractf128_ps(v, 1);
  if (n & 2) _mm_storel_pi((__m64 *)x, part), x += 2, part = _mm_movehl_ps(part, part);
  if (n & 1) _mm_store_ss(x, part);
#else
  float part[LANES];
  store(part, v);
  memcpy(x, part, n * sizeof(float));
#endif
}

/* the first n > 0 numbers, as many as a vector has, and 0 behind them */
static inline vec load_up_to(const float *x, int64_t n) { return n < LANES ? load_some(x, n, 0) : load(x); }

static inline void store_up_to(float *x, vec v, int64_t n) {
  if (n < LANES)
    store_some(x, v, n);
  else
    store(x, v);
}

/* total [n] += x [n] * factor */
static inline void add_to(const float *x, int64_t n, float factor, float *total) {
  for (int64_t j = 0; j < n; j += LANES)
    store_up_to(total + j, load_up_to(total + j, n - j) + load_up_to(x + j, n - j) * factor, n - j);
}

#if LANES == 16
#define NUMBERS 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif LANES == 8
#define NUMBERS 0, 1, 2, 3, 4, 5, 6, 7
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define NUMBERS 0, 1, 2, 3
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif

/* neighboring elements of a and of b added: applied to LANES vectors in rounds it gives the sum of each */
static inline vec add_pairs(vec a, vec b) {
  return __builtin_shufflevector(a, b, EVEN) + __builtin_shufflevector(a, b, ODD);
}

static inline float sum(vec v) {
  for (int n = LANES; n > 1; n /= 2) v = add_pairs(v, v);
  return v[0];
}

/* the sums of `count` vectors, at most LANES, one behind the other: what `add_pairs` gives in rounds */
static inline __attribute__((always_inline)) vec sums_of(vec *v, int count) {
#if LANES == 8
  /* rounds in each half of the vectors, which then are added: half as many instructions */
#pragma GCC unroll 4
  for (int i = 0; i < (count + 1) / 2; i++) v[i] = _mm256_hadd_ps(v[2 * i], v[2 * i + 1 < count ? 2 * i + 1 : 2 * i]);
  vec low = _mm256_hadd_ps(v[0], v[count > 2 ? 1 : 0]), high = low;
  if (count > 4) high = _mm256_hadd_ps(v[2], v[count > 6 ? 3 : 2]);
  return _mm256_permute2f128_ps(low, high, 0x20) + _mm256_permute2f128_ps(low, high, 0x31);
#else
#pragma GCC unroll 4
  for (int lanes = LANES; lanes > 1; lanes /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < (count + 1) / 2; i++) v[i] = add_pairs(v[2 * i], v[2 * i + 1 < count ? 2 * i + 1 : 2 * i]);
    count = (count + 1) / 2;
  }
  return v[0];
#endif
}

static inline float largest(vec v) {
  for (int n = LANES; n > 1; n /= 2) {
    vec even = __builtin_shufflevector(v, v, EVEN), odd = __builtin_shufflevector(v, v, ODD);
    v = larger(odd, even);
  }
  return v[0];
}

#if LANES == 16
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif

/* from [rows, columns] -> to [columns, rows], both at most LANES, with these distances between rows. `to` gets `filled`
   columns, 0 behind `rows`. Interleaving rows LANES / 2 apart, log2(LANES) times, transposes them */
static inline void transpose(const float *from, int64_t from_row, int64_t rows, int64_t columns, float *to,
                             int64_t to_row, int64_t filled) {
  vec a[LANES], b[LANES];
#pragma GCC unroll 16
  for (int r = 0; r < LANES; r++)
    a[r] = r >= rows          ? all(0)
           : columns == LANES ? load(from + r * from_row)
                              : load_some(from + r * from_row, columns, 0);
#pragma GCC unroll 4
  for (int round = LANES; round > 1; round /= 2) {
#pragma GCC unroll 8
    for (int r = 0; r < LANES / 2; r++) {
      b[2 * r] = __builtin_shufflevector(a[r], a[r + LANES / 2], LOW);
      b[2 * r + 1] = __builtin_shufflevector(a[r], a[r + LANES / 2], HIGH);
    }
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) a[r] = b[r];
  }
#pragma GCC unroll 16
  for (int r = 0; r < LANES; r++) {
    if (r >= columns) break;
    if (filled == LANES)
      store(to + r * to_row, a[r]);
    else
      store_some(to + r * to_row, a[r], filled);
  }
}

/* 2^i * e^r, with x = i log 2 + r and |r| <= log(2) / 2, where the polynomial of degree 6 with the least relative error
   (1, r and five terms fitted) is exact to a twentieth of a unit of the last place. To add 1.5 * 2^23 rounds to a whole number, whose bits are the last ones of the sum. 0 below -87.3,
   infinity above 88.7; NaN stays NaN. */
static inline vec vexp(vec x) {
  const float round = 12582912.0f, bias = 127;
  x = smaller(all(89.0f), larger(all(-88.0f), x));
  vec shifted = x * 1.44269504f + (round + bias), n = shifted - (round + bias);
  vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* log 2 in two parts, the first with few digits */
  vec y = all(0.00138145986f);
  y = y * r + 0.00836871692f;
  y = y * r + 0.0416683880f;
  y = y * r + 0.166665206f;
  y = y * r + 0.499999934f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  return y * (vec)((ivec)shifted << 23);
}

/* log x of positive numbers that are not too small to be normal: x = 2^e m with sqrt(1/2) <= m < sqrt(2), and five terms
   of the series of log m in (m - 1) / (m + 1) are exact to a tenth of a unit of the last place */
static inline vec vlog(vec x) {
  ivec e = ((ivec)x - 0x3f3504f3) >> 23;
  vec m = (vec)((ivec)x - (e << 23)), s = (m - 1) / (m + 1), t = s * s;
  vec y = t * (1.0f / 9) + 1.0f / 7;
  y = y * t + 1.0f / 5;
  y = y * t + 1.0f / 3;
  y = y * t + 1.0f;
  return __builtin_convertvector(e, vec) * 0.693147181f + 2 * s * y;
}

/* the largest of a row; NaN is passed over */
static inline float row_max(const float *x, int64_t columns) {
  vec found[4];
  int64_t j = 0;
  for (int i = 0; i < 4; i++) found[i] = all(-INFINITY);
  for (; j + 4 * LANES <= columns; j += 4 * LANES)
    for (int i = 0; i < 4; i++) found[i] = larger(load(x + j + i * LANES), found[i]);
  for (; j + LANES <= columns; j += LANES) found[0] = larger(load(x + j), found[0]);
  if (j < columns) found[1] = larger(load_some(x + j, columns - j, -INFINITY), found[1]);
  return largest(larger(larger(found[0], found[1]), larger(found[2], found[3])));
}
