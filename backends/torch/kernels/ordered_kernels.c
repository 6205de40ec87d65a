/* Kernels of invariant models for float32 on CPUs, for `ordered_kernels.py`: the bits of torch's operators in fewer
   passes over memory.

   Every sum has the order in which a product of matrices adds: one term after the other, each a fused multiply-add,
   from 0 on. Elsewhere a product and a sum are two roundings, so the flags of the compilation forbid contraction. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define LANES 8
#define KEYS 64 /* of a block, whose sums are added to those of the blocks before it */
#define TILE 16 /* keys whose scores are computed at once */
#define MAX_SIZE 128 /* of a head, a multiple of LANES */

typedef float vec __attribute__((vector_size(4 * LANES)));

static inline vec load(const float *x) { vec v; memcpy(&v, x, sizeof v); return v; }
static inline void store(float *x, vec v) { memcpy(x, &v, sizeof v); }
static inline vec all(float x) { return x - (vec){0}; }

/* a * b + c, rounded once where the processor can: libraries of products round twice where it cannot */
static inline vec multiply_add(vec a, vec b, vec c) {
#if defined(__FMA__)
  return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  float32x4_t x[2], y[2], z[2];
  memcpy(x, &a, sizeof a), memcpy(y, &b, sizeof b), memcpy(z, &c, sizeof c);
  for (int i = 0; i < 2; i++) z[i] = vfmaq_f32(z[i], x[i], y[i]);
  memcpy(&c, z, sizeof c);
  return c;
#else
  return a * b + c;
#endif
}

/* --------------------------------------------------------------------------------------------- rotary embeddings */

/* x: [heads, tokens, 2 * half] with strides; cos, sin: [tokens, 2 * half]; out: [tokens, heads, 2 * half]. Each number
   is x * cos, rounded, plus its partner * sin, rounded */
void rotary(const float *x, int64_t head_stride, int64_t token_stride, const float *cos, const float *sin,
            int64_t heads, int64_t tokens, int64_t half, float *out) {
#pragma omp parallel for if (heads * tokens * half > 1 << 14)
  for (int64_t t = 0; t < tokens; t++) {
    const float *c1 = cos + t * 2 * half, *s1 = sin + t * 2 * half, *c2 = c1 + half, *s2 = s1 + half;
    for (int64_t h = 0; h < heads; h++) {
      const float *a = x + h * head_stride + t * token_stride, *b = a + half;
      float *restrict low = out + (t * heads + h) * 2 * half, *restrict high = low + half;
      for (int64_t j = 0; j < half; j++) {
        low[j] = a[j] * c1[j] - b[j] * s1[j];
        high[j] = b[j] * c2[j] + a[j] * s2[j];
      }
    }
  }
}

/* ------------------------------------------------------------------------------------------------ decode attention */

#define SHUFFLE __builtin_shufflevector

/* Eight rows of eight numbers, transposed. `stride`: between rows; `to`: between rows of the result */
static inline void transpose(const float *rows[LANES], int64_t at, float *out, int64_t to) {
  vec r[8], a[8], b[8];
  for (int i = 0; i < 8; i++) r[i] = load(rows[i] + at);
  for (int i = 0; i < 8; i += 2) {
    a[i] = SHUFFLE(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    a[i + 1] = SHUFFLE(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = SHUFFLE(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      b[i + 2 * j + 1] = SHUFFLE(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; i++) {
    store(out + i * to, SHUFFLE(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
    store(out + (i + 4) * to, SHUFFLE(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
  }
}

/* The scores of `count` <= 4 queries [count, size] with the keys of a tile [size, TILE]; scores: [count, stride] */
static inline __attribute__((always_inline)) void tile_scores(const float *queries, const float *tile, int64_t size,
                                                              const int count, float *scores, int64_t stride) {
  vec sums[4][2];
  for (int g = 0; g < count; g++) sums[g][0] = sums[g][1] = all(0);
  for (int64_t j = 0; j < size; j++) {
    vec low = load(tile + j * TILE), high = load(tile + j * TILE + LANES);
    for (int g = 0; g < count; g++) {
      vec q = all(queries[g * size + j]);
      sums[g][0] = multiply_add(q, low, sums[g][0]);
      sums[g][1] = multiply_add(q, high, sums[g][1]);
    }
  }
  for (int g = 0; g < count; g++)
    for (int half = 0; half < 2; half++) store(scores + g * stride + half * LANES, sums[g][half]);
}

/* Begin to bring numbers from memory, which the order of `transpose` hides from the processor. They need not exist */
static inline void fetch(const float *x, int64_t count) {
  for (int64_t j = 0; j < count; j += 16) __builtin_prefetch(x + j);
}

/* What `queries` [count, size] score with tokens first ... end - 1 of keys [., size], less the largest of each query;
   the other numbers of scores [count, stride] become 0, which no exponential takes long for */
static void token_scores(const float *queries, int64_t count, int64_t size, const float *keys, int64_t first,
                         int64_t end, float *scores, int64_t stride) {
  float tile[MAX_SIZE * TILE];
  for (int64_t t = first / TILE * TILE; t < end; t += TILE) {
    fetch(keys + (t + TILE) * size, TILE * size);
    for (int half = 0; half < TILE; half += LANES) {
      const float *rows[LANES];
      for (int i = 0; i < LANES; i++) rows[i] = keys + (t + half + i < end ? t + half + i : end - 1) * size;
      for (int64_t j = 0; j < size; j += LANES) transpose(rows, j, tile + j * TILE + half, TILE);
    }
    int64_t g = 0;
    for (; g + 4 <= count; g += 4) tile_scores(queries + g * size, tile, size, 4, scores + g * stride + t, stride);
    for (; g + 2 <= count; g += 2) tile_scores(queries + g * size, tile, size, 2, scores + g * stride + t, stride);
    if (g < count) tile_scores(queries + g * size, tile, size, 1, scores + g * stride + t, stride);
  }
  for (int64_t g = 0; g < count; g++) {
    float *own = scores + g * stride, largest = first < end ? own[first] : 0;
    for (int64_t t = first; t < end; t++) largest = own[t] > largest ? own[t] : largest;
    if (largest < -FLT_MAX) largest = -FLT_MAX; /* as torch's operators: no weights, and not NaN */
    for (int64_t t = 0; t < first && t < stride; t++) own[t] = 0;
    for (int64_t t = first; t < end; t++) own[t] -= largest;
    for (int64_t t = end; t < stride; t++) own[t] = 0;
  }
}

/* Writes one token of each sequence to the cache, and what it scores with the first `kv_len` of those that are there,
   less the largest score, to weights [sequences, heads, kv_len up to a multiple of TILE]. q: [heads, sequences, size]
   with strides; k, v: [kv_heads, sequences, size] with strides; keys, values: [sequences, kv_heads, width, size], where
   `slot` is the distance between two sequences; positions: [sequences], of the new tokens, below width; window: how
   many tokens one sees at most. Returns 1 without memory, else 0 */
int decode_scores(const float *q, int64_t q_head, int64_t q_seq, const float *k, int64_t k_head, int64_t k_seq,
                  const float *v, int64_t v_head, int64_t v_seq, float *keys, float *values, int64_t slot,
                  const int64_t *positions, int64_t sequences, int64_t heads, int64_t kv_heads, int64_t width,
                  int64_t size, float scale, int64_t window, int64_t kv_len, float *weights) {
  int64_t count = heads / kv_heads, columns = (kv_len + TILE - 1) / TILE * TILE;
  int failed = 0;
#pragma omp parallel if (sequences * heads * columns * size > 1 << 16)
  {
    float *queries = malloc(count * size * sizeof(float));
    if (!queries)
#pragma omp atomic write
      failed = 1;
#pragma omp for collapse(2)
    for (int64_t s = 0; s < sequences; s++)
      for (int64_t h = 0; h < kv_heads; h++) {
        if (!queries) continue;
        int64_t at = s * slot + h * width * size, last = positions[s];
        memcpy(keys + at + last * size, k + h * k_head + s * k_seq, size * sizeof(float));
        memcpy(values + at + last * size, v + h * v_head + s * v_seq, size * sizeof(float));
        fetch(keys + at + width * size, TILE * size); /* for the next head */
        fetch(keys + at + width * size + last * size, size), fetch(values + at + width * size + last * size, size);
        for (int64_t g = 0; g < count; g++)
          for (int64_t j = 0; j < size; j++)
            queries[g * size + j] = q[(h * count + g) * q_head + s * q_seq + j] * scale;
        token_scores(queries, count, size, keys + at, last + 1 > window ? last + 1 - window : 0,
                     last < kv_len ? last + 1 : kv_len, weights + (s * heads + h * count) * columns, columns);
      }
    free(queries);
  }
  return failed;
}

/* The sum of a block of weights as torch computes that of a row, in vectors of `lanes`: four sums of every fourth
   vector each, then these, then the elements of the vector that is left */
static inline __attribute__((always_inline)) float sum_in_vectors(const float *weights, const int lanes) {
  float total = 0, sums[16];
  for (int i = 0; i < lanes; i++) {
    float parts[4] = {0, 0, 0, 0};
    for (int j = 0; j < KEYS; j += 4 * lanes)
      for (int k = 0; k < 4; k++) parts[k] += weights[j + k * lanes + i];
    sums[i] = ((parts[0] + parts[1]) + parts[2]) + parts[3];
  }
  for (int i = 0; i < lanes; i++) total += sums[i];
  return total;
}

static float block_sum(const float *weights, int64_t lanes) {
  if (lanes == 4) return sum_in_vectors(weights, 4);
  return lanes == 8 ? sum_in_vectors(weights, 8) : sum_in_vectors(weights, 16);
}

/* out [LANES * count] plus the sum of weights [tokens] * values [tokens, size] */
static inline __attribute__((always_inline)) void value_sums(const float *weights, const float *values, int64_t tokens,
                                                             int64_t size, const int count, float *out) {
  vec sums[8];
  for (int j = 0; j < count; j++) sums[j] = all(0);
  for (int64_t t = 0; t < tokens; t++) {
    vec w = all(weights[t]);
    for (int j = 0; j < count; j++) sums[j] = multiply_add(w, load(values + t * size + j * LANES), sums[j]);
  }
  for (int j = 0; j < count; j++) store(out + j * LANES, load(out + j * LANES) + sums[j]);
}

/* out [sequences, heads, size]: the sum over tokens of weights * values, over the sum of the weights. The rest as of
   `decode_scores`; lanes: as of `sum_in_vectors` */
void decode_values(const float *weights, const float *values, int64_t slot, const int64_t *positions, int64_t sequences,
                   int64_t heads, int64_t kv_heads, int64_t width, int64_t size, int64_t window, int64_t kv_len,
                   int64_t lanes, float *out) {
  int64_t count = heads / kv_heads, columns = (kv_len + TILE - 1) / TILE * TILE;
#pragma omp parallel for collapse(2) if (sequences * heads * columns * size > 1 << 16)
  for (int64_t s = 0; s < sequences; s++)
    for (int64_t h = 0; h < heads; h++) {
      const float *own = values + s * slot + h / count * width * size;
      float *result = out + (s * heads + h) * size, total = 0;
      int64_t last = positions[s], end = last < kv_len ? last + 1 : kv_len;
      int64_t begin = last + 1 > window ? last + 1 - window : 0;
      memset(result, 0, size * sizeof(float));
      for (int64_t at = begin < end ? begin / KEYS * KEYS : end; at < end; at += KEYS) {
        int64_t from = at > begin ? at : begin, to = at + KEYS < end ? at + KEYS : end, j = 0;
        float block[KEYS] = {0};
        memcpy(block + (from - at), weights + (s * heads + h) * columns + from, (to - from) * sizeof(float));
        total += block_sum(block, lanes);
        const float *w = block + (from - at), *x = own + from * size;
        for (; j + 8 * LANES <= size; j += 8 * LANES) value_sums(w, x + j, to - from, size, 8, result + j);
        for (; j + 4 * LANES <= size; j += 4 * LANES) value_sums(w, x + j, to - from, size, 4, result + j);
        for (; j + 2 * LANES <= size; j += 2 * LANES) value_sums(w, x + j, to - from, size, 2, result + j);
        for (; j < size; j += LANES) value_sums(w, x + j, to - from, size, 1, result + j);
      }
      total = total > 0x1p-126f ? total : 0x1p-126f;
      for (int64_t j = 0; j < size; j++) result[j] /= total;
    }
}

/* sums [rows] of weights [rows, KEYS] */
void block_sums(const float *weights, int64_t rows, int64_t lanes, float *sums) {
  for (int64_t row = 0; row < rows; row++) sums[row] = block_sum(weights + row * KEYS, lanes);
}
