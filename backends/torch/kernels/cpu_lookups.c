/* Small operators on integers of a decode step, for `cpu_kernels.py`: in C they need no call of their own. */

#include "cpu_vectors.h"

#define OUT_OF_RANGE 2 /* as `kernel_library.check` knows it */

/* out [count] = a + b */
void add_integers(const int64_t *a, const int64_t *b, int64_t count, int64_t *out) {
  for (int64_t i = 0; i < count; i++) out[i] = (int64_t)((uint64_t)a[i] + (uint64_t)b[i]);
}

/* out [count, size]: rows of table [rows, size] */
int select_rows(const float *table, int64_t rows, int64_t size, const int64_t *ids, int64_t count, float *out) {
  for (int64_t i = 0; i < count; i++) {
    if (ids[i] < 0 || ids[i] >= rows) return OUT_OF_RANGE;
    memcpy(out + i * size, table + ids[i] * size, size * sizeof(float));
  }
  return 0;
}

/* out [rows]: of each row of x [rows, columns] the element of its column */
int select_columns(const double *x, int64_t columns, const int64_t *column, int64_t rows, double *out) {
  for (int64_t i = 0; i < rows; i++) {
    if (column[i] < 0 || column[i] >= columns) return OUT_OF_RANGE;
    memcpy(out + i, x + i * columns + column[i], sizeof(double));
  }
  return 0;
}
