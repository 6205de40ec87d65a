/* What integers say where to find or to put: small operators of a decode step (`cpu_lookups.py`), and tokens that go to
   the KV cache (`cpu_kernels.py`). */

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

/* Token source[i] of x [heads, tokens, size], which has strides, (token i where source is NULL) goes to column columns[i]
   of slot slots[i] of cache [num_slots, heads, width, size], for all i < count */
int write_tokens(const float *x, int64_t head_stride, int64_t token_stride, int64_t tokens, const int64_t *source,
                 const int64_t *slots, const int64_t *columns, int64_t count, int64_t heads, int64_t size, float *cache,
                 int64_t num_slots, int64_t width) {
  for (int64_t i = 0; i < count; i++) {
    int64_t token = source ? source[i] : i;
    if (token < 0 || token >= tokens || slots[i] < 0 || slots[i] >= num_slots || columns[i] < 0 || columns[i] >= width)
      return OUT_OF_RANGE;
  }
#pragma omp parallel for if (count * heads * size > 1 << 15)
  for (int64_t i = 0; i < count; i++) {
    const float *from = x + (source ? source[i] : i) * token_stride;
    float *to = cache + (slots[i] * heads * width + columns[i]) * size;
    for (int64_t h = 0; h < heads; h++)
      for (int64_t j = 0; j < size; j += LANES)
        store_up_to(to + h * width * size + j, load_up_to(from + h * head_stride + j, size - j), size - j);
  }
  return 0;
}
