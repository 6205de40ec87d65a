/* Updates by AdamW in float32, for `adamw.py`: a parameter's gradient is clipped and used and becomes 0, while its
   numbers are in registers. They are far larger than the caches together, so a pass over them takes as long as memory.

   The bits are those of torch's fused AdamW in its loop over vectors, here for the rest of a tensor, too. So which
   products are rounded before they are added is not left to the compiler. */

#include "cpu_vectors.h"

/* x, a product: rounded before it is added to anything, since the compiler knows nothing about it any more */
static inline vec rounded(vec x) {
#if LANES == 16
  __asm__("" : "+v"(x));
#elif defined(__SSE__)
  __asm__("" : "+x"(x));
#elif defined(__ARM_NEON)
  __asm__("" : "+w"(x));
#else
  __asm__("" : "+m"(x));
#endif
  return x;
}

/* a * b + c, rounded once where the processor can */
static inline vec multiply_add(vec a, vec b, vec c) {
#if LANES == 16
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

#if LANES == 16
static inline vec root(vec x) { return _mm512_sqrt_ps(x); }
#elif LANES == 8
static inline vec root(vec x) { return _mm256_sqrt_ps(x); }
#elif defined(__SSE__)
static inline vec root(vec x) { return _mm_sqrt_ps(x); }
#else
static inline vec root(vec x) {
  for (int i = 0; i < LANES; i++) x[i] = sqrtf(x[i]);
  return x;
}
#endif

/* Coefficients of an update, by `adamw.py` */
typedef struct {
  float factor;       /* of the gradient, which clips it */
  float kept;         /* of the parameter: 1 - learning rate * weight decay */
  float fresh;        /* of the gradient in the new mean */
  float beta2;        /* of the square in the new one */
  float fresh_square; /* of the gradient's square in the new one */
  float root_bias;    /* of the root of the square, by which that is divided */
  float eps;          /* added to it */
  float step;         /* of the mean, in the difference of the parameter */
} coefficients;

/* parameter, grad, mean, square: [n], of which grad becomes 0 */
void adamw(float *parameter, float *grad, float *mean, float *square, int64_t n, const coefficients *by) {
  const coefficients c = *by;
  const int is_small = c.fresh < 0.5f; /* else the new mean is computed from the gradient instead of the old mean */
  const float of_difference = is_small ? c.fresh : c.fresh - 1;
#pragma omp parallel for if (n > 1 << 15)
  for (int64_t i = 0; i < n; i += LANES) {
    int64_t left = n - i;
    vec g = rounded(load_up_to(grad + i, left) * c.factor), m = load_up_to(mean + i, left);
    m = multiply_add(g - m, all(of_difference), is_small ? m : g);
    vec s = multiply_add(g * c.fresh_square, g, rounded(load_up_to(square + i, left) * c.beta2));
    vec p = rounded(load_up_to(parameter + i, left) * c.kept) - m * c.step / (root(s) / c.root_bias + c.eps);
    store_up_to(parameter + i, p, left);
    store_up_to(grad + i, all(0), left);
    store_up_to(mean + i, m, left);
    store_up_to(square + i, s, left);
  }
}
