/* Products in float32 of many rows (`panel_products.py`): x [rows, size] @ weight [size, columns].

   The weight is copied to panels of as many columns as a tile of the result has, in the order in which tiles read them:
   BLOCK_TERMS terms of it at a time, which stay in the cache while the rows pass. The sums of a tile are in registers.
   An element is the sum of its products in their order, so a row has the same bits however many rows and columns there
   are. */

#include "cpu_vectors.h"

#if LANES == 16
#define TILE_ROWS 6
#define PANEL_VECTORS 4
#else
#define TILE_ROWS 4
#define PANEL_VECTORS 3
#endif
#define PANEL (PANEL_VECTORS * LANES) /* columns */
#define BLOCK_TERMS 512               /* a multiple of LANES */
#define PASSING_ROWS 192              /* whose terms stay in the cache while all panels pass: a multiple of TILE_ROWS */
#define MOST_PACKED (1 << 20)         /* floats of panels, at a time */
#define FEW_PACKED (2 * PANEL * BLOCK_TERMS) /* of up to MANY_ROWS: panels do not leave the cache then */
#define MANY_ROWS 1024
#define AHEAD 12                      /* terms: how far ahead of copying they are fetched, as they are far apart */

/* terms x columns of a weight, of which one of the two strides is 1, -> a panel [terms, PANEL], 0 behind the columns */
static void pack_panel(const float *weight, int64_t term_stride, int64_t column_stride, int64_t terms, int64_t columns,
                       float *panel) {
  if (column_stride == 1)
    for (int64_t i = 0; i < terms; i++) {
      for (int64_t c = 0; c < PANEL; c += LINE) __builtin_prefetch(weight + (i + AHEAD) * term_stride + c);
#pragma GCC unroll 4
      for (int64_t c = 0; c < PANEL; c += LANES)
        store(panel + i * PANEL + c,
              columns > c ? load_up_to(weight + i * term_stride + c, columns - c) : all(0));
    }
  else
    for (int64_t c = 0; c < PANEL; c += LANES)
      for (int64_t i = 0; i < terms; i += LANES) {
        int64_t high = least(LANES, terms - i);
        if (columns > c)
          transpose(weight + c * column_stride + i, column_stride, least(LANES, columns - c), high,
                    panel + i * PANEL + c, PANEL, LANES);
        else
          for (int64_t j = 0; j < high; j++) store(panel + (i + j) * PANEL + c, all(0));
      }
}

/* out [rows, columns], rows `out_row` apart, = x [rows, terms] @ panel + out, or + bias [columns], or 0 for NULL, where
   `begins`. columns: up to those of the vectors */
static inline __attribute__((always_inline)) void panel_tile(const float *x, int64_t x_row, int64_t x_term,
                                                             const float *panel, int64_t terms, const float *bias,
                                                             int begins, float *out, int64_t out_row, int64_t columns,
                                                             const int rows, const int vectors) {
  vec sums[TILE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 4
  for (int v = 0; v < vectors; v++) {
    vec begin = bias ? load_up_to(bias + v * LANES, columns - v * LANES) : all(0);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
      sums[r][v] = begins ? begin : load_up_to(out + r * out_row + v * LANES, columns - v * LANES);
  }
  for (int64_t i = 0; i < terms; i++) {
    vec own[PANEL_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      own[v] = load(panel + i * PANEL + v * LANES);
      IN_REGISTER(own[v]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) sums[r][v] += own[v] * x[r * x_row + i * x_term];
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
      store_up_to(out + r * out_row + v * LANES, sums[r][v], columns - v * LANES);
}

/* The same of any number of rows, at most TILE_ROWS, and columns, at most PANEL */
static void panel_product(const float *x, int64_t x_row, int64_t x_term, const float *panel, int64_t terms,
                          const float *bias, int begins, float *out, int64_t out_row, int64_t rows, int64_t columns) {
#define WITH(ROWS, N) panel_tile(x, x_row, x_term, panel, terms, bias, begins, out, out_row, columns, ROWS, N)
#define WITH_VECTORS(N)                                                                       \
  switch (rows) {                                                                             \
    case 1: WITH(1, N); break;                                                                \
    case 2: WITH(2, N); break;                                                                \
    case 3: WITH(3, N); break;                                                                \
    case 4: WITH(4, N); break;                                                                \
    default: if (rows == 5 && TILE_ROWS > 5) WITH(5, N); else WITH(TILE_ROWS, N);             \
  }
  switch ((columns + LANES - 1) / LANES) {
    case 1: WITH_VECTORS(1) break;
    case 2: WITH_VECTORS(2) break;
#if PANEL_VECTORS == 4
    case 3: WITH_VECTORS(3) break;
#endif
    default: WITH_VECTORS(PANEL_VECTORS)
  }
#undef WITH_VECTORS
#undef WITH
}

/* x, whose rows are next to one another in memory and terms `x_term` apart -> TILE_ROWS rows at a time [terms, TILE_ROWS].
   A few terms at a time: what is read and written stays in the cache */
static void gather_rows(const float *x, int64_t x_term, int64_t rows, int64_t terms, float *gathered) {
  for (int64_t first = 0; first < terms; first += LINE)
    for (int64_t row = 0; row < rows; row += TILE_ROWS) {
      float *to = gathered + row * terms;
      int64_t end = least(first + LINE, terms);
      if (row % LINE == 0) for (int64_t i = first; i < end; i++) __builtin_prefetch(x + (i + LINE) * x_term + row);
      if (row + TILE_ROWS <= rows)
        for (int64_t i = first; i < end; i++) memcpy(to + i * TILE_ROWS, x + i * x_term + row, TILE_ROWS * sizeof(float));
      else
        for (int64_t i = first; i < end; i++) memcpy(to + i * TILE_ROWS, x + i * x_term + row, (rows - row) * sizeof(float));
    }
}

/* out [rows, columns] = x [rows, size] @ weight [size, columns] + bias [columns], or NULL; where `adds`, + out instead.
   x, weight: with these strides, of which one of each is 1. Returns 1 without memory, else 0 */
int panel_products(const float *x, int64_t x_row, int64_t x_term, const float *weight, int64_t term_stride,
                   int64_t column_stride, const float *bias, int64_t rows, int64_t columns, int64_t size, int adds,
                   float *out) {
  int64_t most_terms = least(BLOCK_TERMS, size), panels = (columns + PANEL - 1) / PANEL;
  int64_t most_packed = rows <= MANY_ROWS && x_term == 1 ? FEW_PACKED : MOST_PACKED; /* else rows are gathered again */
  int64_t at_once = least(panels, most_packed / (most_terms * PANEL));
  float *packed = aligned_alloc(64, (at_once * most_terms * PANEL * sizeof(float) + 63) / 64 * 64);
  int failed = !packed;
#pragma omp parallel if (rows * columns * size > 1 << 19)
  {
    float *gathered = x_term == 1 ? NULL : aligned_alloc(64, PASSING_ROWS * most_terms * sizeof(float));
    if (x_term != 1 && !gathered) failed = 1;
#pragma omp barrier
    for (int64_t p = 0; p < panels && !failed; p += at_once)
      for (int64_t i = 0; i < size; i += BLOCK_TERMS) {
        int64_t terms = least(BLOCK_TERMS, size - i), count = least(at_once, panels - p);
#pragma omp for
        for (int64_t j = 0; j < count; j++) {
          int64_t c = (p + j) * PANEL;
          pack_panel(weight + i * term_stride + c * column_stride, term_stride, column_stride, terms,
                     least(PANEL, columns - c), packed + j * terms * PANEL);
        }
#pragma omp for
        for (int64_t first = 0; first < rows; first += PASSING_ROWS) {
          const float *passing = x + first * x_row + i * x_term;
          int64_t high = least(PASSING_ROWS, rows - first);
          if (gathered) gather_rows(passing, x_term, high, terms, gathered);
          for (int64_t j = 0; j < count; j++) {
            int64_t c = (p + j) * PANEL;
            for (int64_t row = 0; row < high; row += TILE_ROWS)
              panel_product(gathered ? gathered + row * terms : passing + row * x_row, gathered ? 1 : x_row,
                            gathered ? TILE_ROWS : 1, packed + j * terms * PANEL, terms, bias ? bias + c : NULL,
                            i == 0 && !adds, out + (first + row) * columns + c, columns,
                            least(TILE_ROWS, high - row), least(PANEL, columns - c));
          }
        }
      }
    free(gathered);
  }
  free(packed);
  return failed;
}
