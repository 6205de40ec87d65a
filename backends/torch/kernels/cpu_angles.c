/* Cosines and sines of the angles of rotary position embeddings, for `cpu_rotary.py`.

   An angle is a product in float32, as models define it, and may be many turns. What is left of it beside whole quarters
   of a turn is computed in float64, with a quarter in two parts (Cody and Waite 1980), and so are the polynomials, whose
   terms are those of the Taylor series: within 1e-9 of the functions, so that nearly all results are the float32 numbers
   closest to them. */

#include "cpu_vectors.h"

typedef double dvec __attribute__((vector_size(4 * LANES)));
typedef int64_t lvec __attribute__((vector_size(4 * LANES)));
typedef float halfvec __attribute__((vector_size(2 * LANES))); /* as many numbers as a dvec has */

/* |x| < 2^50, which is beyond all angles */
static inline void cos_and_sin(dvec x, dvec *cosine, dvec *sine) {
  const double round = 0x1.8p52; /* a sum with it has no fraction */
  dvec shifted = x * 0x1.45f306dc9c883p-1 + round, quarters = shifted - round;
  lvec turn = (lvec)shifted; /* whose last two bits are those of the number of quarters */
  dvec r = x - quarters * 0x1.921fb54442d18p0 - quarters * 0x1.1a62633145c07p-54, s = r * r;
  dvec odd = r + r * s * (-1.0 / 6 + s * (1.0 / 120 + s * (-1.0 / 5040 + s * (1.0 / 362880 + s * (-1.0 / 39916800)))));
  dvec even = 1.0 + s * (-0.5 + s * (1.0 / 24 + s * (-1.0 / 720 + s * (1.0 / 40320 + s * (-1.0 / 3628800)))));
  lvec swapped = -(turn & 1), of_sine = (turn & 2) << 62, of_cosine = ((turn + 1) & 2) << 62;
  *sine = (dvec)(((swapped & (lvec)even) | (~swapped & (lvec)odd)) ^ of_sine);
  *cosine = (dvec)(((swapped & (lvec)odd) | (~swapped & (lvec)even)) ^ of_cosine);
}

/* cosines, sines [tokens, 2 * half]: those of position * frequency, times `scaling`, twice in a row */
void rotary_angles(const int64_t *positions, const float *frequencies, int64_t tokens, int64_t half, float scaling,
                   float *cosines, float *sines) {
#pragma omp parallel for if (tokens * half > 1 << 13)
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t j = 0; j < half; j += LANES) {
      vec angle = load_up_to(frequencies + j, half - j) * (float)positions[t];
      float c[LANES], s[LANES];
      for (int i = 0; i < 2; i++) {
        halfvec part;
        dvec cosine, sine;
        memcpy(&part, (float *)&angle + i * (LANES / 2), sizeof part);
        cos_and_sin(__builtin_convertvector(part, dvec), &cosine, &sine);
        part = __builtin_convertvector(cosine, halfvec), memcpy(c + i * (LANES / 2), &part, sizeof part);
        part = __builtin_convertvector(sine, halfvec), memcpy(s + i * (LANES / 2), &part, sizeof part);
      }
      for (int again = 0; again < 2; again++) {
        int64_t at = t * 2 * half + again * half + j;
        store_up_to(cosines + at, load(c) * scaling, half - j);
        store_up_to(sines + at, load(s) * scaling, half - j);
      }
    }
}
