/* Products in float32: x [rows, size] @ weight [columns, size].T for few rows, as in decoding (`few_row_products.py`),
   and samples from a head (`cpu_sampling.py`).

   A library copies a weight to an order of its own before it multiplies, which costs as much as the product where rows
   are few. Here the weight is read as it is stored, once, and the sums of a tile of rows and columns are in registers.

   Up to DOT_ROWS rows: a vector holds LANES inputs, of a row or of a column, and LANES sums of a product are added at
   the end. More rows are copied, transposed, so that a vector holds an input of LANES rows, each element of the weight
   is multiplied with all of them, and tiles of up to ROW_VECTORS such vectors are transposed back in the cache. In
   each of the two ways a row has the same bits, however many there are.

   Time is that of reading the weight, which waits for memory. Short columns are not read in the order of memory, so the
   processor does not fetch them ahead; a tile fetches what the next one reads, line by line in that order, which is
   twice as fast as column by column. */

#include "cpu_vectors.h"

#define DOT_ROWS 4
#if LANES == 16
#define ROW_VECTORS 4 /* of rows in a tile, at most */
#define TILE_COLUMNS(N) 6 /* of a tile. More, and their lines and those of the next tile evict one another */
#define DOT_COLUMNS(ROWS) 4
#define LONG_DOT_COLUMNS(ROWS) 6
#else
#define ROW_VECTORS 3
#define TILE_COLUMNS(N) ((N) == 1 ? 8 : (N) == 2 ? 6 : 4)
#define DOT_COLUMNS(ROWS) ((ROWS) == 1 ? 6 : (ROWS) == 2 ? 4 : 2)
#define LONG_DOT_COLUMNS DOT_COLUMNS
#endif
#define MOST_COLUMNS 8
#define GROUP 48 /* columns whose tiles are transposed back together: a multiple of those of a tile */
#define HALF (LANES / 2)
#define BLOCK_ROWS (ROW_VECTORS * LANES)
#define LONG (1 << 10) /* inputs from which on the processor fetches the columns of a tile itself */

/* total [rows, columns], vectors, += x [rows, n] * weight [columns, n], n <= LANES */
static inline __attribute__((always_inline)) void dot_step(const float *x, int64_t x_row, const float *weight,
                                                           int64_t size, int64_t n, vec *total, const int rows,
                                                           const int columns) {
  vec own[MOST_COLUMNS];
#pragma GCC unroll 8
  for (int c = 0; c < columns; c++) {
    own[c] = load_up_to(weight + c * size, n);
    if (rows > 1) IN_REGISTER(own[c]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++) {
    vec inputs = load_up_to(x + r * x_row, n);
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) total[r * columns + c] += inputs * own[c];
  }
}

/* out[row, column], rows `out_row` and columns `out_column` apart, = x [rows, size] @ weight [columns, size].T + bias of
   a tile. fetches: the next tile of columns */
static inline __attribute__((always_inline)) void dot_tile(const float *x, int64_t x_row, const float *weight,
                                                           const float *bias, int64_t size, float *out, int64_t out_row,
                                                           int64_t out_column, const int rows, const int columns,
                                                           const int fetches) {
  vec total[DOT_ROWS * MOST_COLUMNS];
  float sums[DOT_ROWS * MOST_COLUMNS + LANES];
  int64_t i = 0;
#pragma GCC unroll 32
  for (int j = 0; j < rows * columns; j++) total[j] = all(0);
  for (; i + LANES <= size; i += LANES) {
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++)
      if (fetches) __builtin_prefetch(weight + columns * (size + i) + c * LANES);
    dot_step(x + i, x_row, weight + i, size, LANES, total, rows, columns);
  }
  if (i < size) dot_step(x + i, x_row, weight + i, size, size - i, total, rows, columns);
#pragma GCC unroll 4
  for (int j = 0; j < rows * columns; j += LANES)
    store(sums + j, sums_of(total + j, least(LANES, rows * columns - j)));
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++)
      out[r * out_row + c * out_column] = sums[r * columns + c] + (bias ? bias[c] : 0);
}

/* The same of any number of columns, `at_once` of them at a time and then one */
static inline __attribute__((always_inline)) void dot_tiles(const float *x, int64_t x_row, const float *weight,
                                                            const float *bias, int64_t size, int64_t columns,
                                                            float *out, int64_t out_row, int64_t out_column,
                                                            const int rows, const int at_once, const int fetches) {
  int64_t c = 0;
  for (; c + at_once <= columns; c += at_once)
    dot_tile(x, x_row, weight + c * size, bias ? bias + c : NULL, size, out + c * out_column, out_row, out_column, rows,
             at_once, fetches);
  for (; c < columns; c++)
    dot_tile(x, x_row, weight + c * size, bias ? bias + c : NULL, size, out + c * out_column, out_row, out_column, rows,
             1, 0);
}

/* The same of at most DOT_ROWS rows */
static void dot_products(const float *x, int64_t x_row, const float *weight, const float *bias, int64_t rows,
                         int64_t size, int64_t columns, float *out, int64_t out_row, int64_t out_column) {
#define WITH(ROWS, COLUMNS, FETCHES) \
  dot_tiles(x, x_row, weight, bias, size, columns, out, out_row, out_column, ROWS, COLUMNS, FETCHES)
#define CASE(ROWS)                                                                             \
  case ROWS:                                                                                   \
    if (size < LONG) WITH(ROWS, DOT_COLUMNS(ROWS), 1); else WITH(ROWS, LONG_DOT_COLUMNS(ROWS), 0);         \
    break;
  switch (rows) {
    CASE(1)
    CASE(2)
    CASE(3)
    CASE(4)
  }
#undef CASE
#undef WITH
}

/* sums [columns, vectors] of rows [size, vectors] and weight [columns, size], with bias or 0 first, in vectors of TYPE.
   What is fetched is of the next tile's columns, which are next in memory: the order in which numbers are read is not
   that of memory, so the processor does not fetch them before */
#define ROW_TILE(NAME, TYPE)                                                                                          \
  static inline __attribute__((always_inline)) void NAME(const float *rows, const float *weight, const float *bias,   \
                                                         int64_t size, float *sums, const int vectors,                \
                                                         const int columns) {                                         \
    const int lanes = sizeof(TYPE) / sizeof(float);                                                                   \
    TYPE total[MOST_COLUMNS][ROW_VECTORS], own[ROW_VECTORS];                                                          \
    _Pragma("GCC unroll 8") for (int c = 0; c < columns; c++)                                                         \
      _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) total[c][v] = (bias ? bias[c] : 0) - (TYPE){0};       \
    for (int64_t first = 0; first < size; first += LINE) {                                                            \
      _Pragma("GCC unroll 8") for (int c = 0; c < columns; c++)                                                       \
        __builtin_prefetch(weight + (columns + c) * size + first);                                                    \
      for (int64_t i = first; i < size && i < first + LINE; i++) {                                                    \
        _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) {                                                   \
          memcpy(&own[v], rows + (i * vectors + v) * lanes, sizeof(TYPE));                                            \
          IN_REGISTER(own[v]);                                                                                        \
        }                                                                                                             \
        _Pragma("GCC unroll 8") for (int c = 0; c < columns; c++)                                                     \
          _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) total[c][v] += own[v] * weight[c * size + i];     \
      }                                                                                                               \
    }                                                                                                                 \
    _Pragma("GCC unroll 8") for (int c = 0; c < columns; c++)                                                         \
      _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++)                                                       \
        memcpy(sums + (c * vectors + v) * lanes, &total[c][v], sizeof(TYPE));                                         \
  }                                                                                                                   \
  /* of the columns of a group, `at_once` of them at a time and then two and one */                                   \
  static inline __attribute__((always_inline)) void NAME##s(const float *rows, const float *weight, const float *bias,\
                                                            int64_t size, int64_t columns, float *sums,               \
                                                            const int vectors, const int at_once) {                   \
    int64_t c = 0, wide = vectors * sizeof(TYPE) / sizeof(float);                                                     \
    for (; c + at_once <= columns; c += at_once)                                                                      \
      NAME(rows, weight + c * size, bias ? bias + c : NULL, size, sums + c * wide, vectors, at_once);                 \
    for (; c + 2 <= columns; c += 2)                                                                                  \
      NAME(rows, weight + c * size, bias ? bias + c : NULL, size, sums + c * wide, vectors, 2);                       \
    if (c < columns) NAME(rows, weight + c * size, bias ? bias + c : NULL, size, sums + c * wide, vectors, 1);        \
  }

ROW_TILE(row_tile, vec)
#if LANES == 16
typedef float half __attribute__((vector_size(4 * HALF)));
ROW_TILE(half_row_tile, half)
#endif

/* Numbers of the vectors that hold `rows` rows of a block: few rows take half a vector of 16 */
static inline int64_t width(int64_t rows) {
  return LANES == 16 && rows <= HALF ? HALF : (rows + LANES - 1) / LANES * LANES;
}

/* x [rows, size], rows `x_row` apart -> blocks of at most BLOCK_ROWS rows [size, width], each BLOCK_ROWS * size long */
static void transposed_blocks(const float *x, int64_t x_row, int64_t rows, int64_t size, float *blocks) {
  for (int64_t row = 0; row < rows; row += LANES) {
    int64_t first = row / BLOCK_ROWS * BLOCK_ROWS, wide = width(least(BLOCK_ROWS, rows - first));
    for (int64_t i = 0; i < size; i += LANES)
      transpose(x + row * x_row + i, x_row, least(LANES, rows - row), least(LANES, size - i),
                blocks + first * size + i * wide + row - first, wide, least(LANES, wide));
  }
}

/* sums [columns, wide] = weight @ block.T + bias of a group of columns; block: [size, wide] */
static void block_tiles(const float *block, int64_t wide, const float *weight, const float *bias, int64_t size,
                        int64_t columns, float *sums) {
  switch (wide) {
#if LANES == 16
    case LANES / 2: half_row_tiles(block, weight, bias, size, columns, sums, 1, 8); break;
    case 3 * LANES: row_tiles(block, weight, bias, size, columns, sums, 3, TILE_COLUMNS(3)); break;
#endif
    case LANES: row_tiles(block, weight, bias, size, columns, sums, 1, TILE_COLUMNS(1)); break;
    case 2 * LANES: row_tiles(block, weight, bias, size, columns, sums, 2, TILE_COLUMNS(2)); break;
    default: row_tiles(block, weight, bias, size, columns, sums, ROW_VECTORS, TILE_COLUMNS(ROW_VECTORS));
  }
}

/* out [rows, columns], rows `out_row` apart, = block @ weight.T + bias for a group of columns. rows: of a block */
static void group_product(const float *block, int64_t rows, const float *weight, const float *bias, int64_t size,
                          int64_t columns, float *out, int64_t out_row) {
  float sums[GROUP * BLOCK_ROWS] __attribute__((aligned(64)));
  int64_t wide = width(rows);
  block_tiles(block, wide, weight, bias, size, columns, sums);
  for (int64_t row = 0; row < rows; row += LANES)
    for (int64_t c = 0; c < columns; c += LANES)
      transpose(sums + c * wide + row, wide, least(LANES, columns - c), least(LANES, rows - row),
                out + row * out_row + c, out_row, least(LANES, columns - c));
}

/* out [rows, columns] = x [rows, size], rows `x_row` apart, @ weight [columns, size].T + bias [columns], or NULL.
   Returns 1 without memory, else 0 */
int few_row_product(const float *x, int64_t x_row, const float *weight, const float *bias, int64_t rows,
                    int64_t columns, int64_t size, float *out) {
  float *blocks = NULL;
  if (rows > DOT_ROWS) {
    blocks = aligned_alloc(64, ((rows + LANES - 1) / LANES * LANES * size * sizeof(float) + 63) / 64 * 64);
    if (!blocks) return 1;
    transposed_blocks(x, x_row, rows, size, blocks);
  }
#pragma omp parallel for if (rows * columns * size > 1 << 19)
  for (int64_t c = 0; c < columns; c += GROUP) {
    const float *own = weight + c * size, *its_bias = bias ? bias + c : NULL;
    int64_t count = least(GROUP, columns - c);
    if (!blocks) dot_products(x, x_row, own, its_bias, rows, size, count, out + c, columns, 1);
    for (int64_t row = 0; blocks && row < rows; row += BLOCK_ROWS)
      group_product(blocks + row * size, least(BLOCK_ROWS, rows - row), own, its_bias, size, count,
                    out + row * columns + c, columns);
  }
  free(blocks);
  return 0;
}

/* total [rows, columns] += x [columns, rows].T */
void add_transposed(const float *x, int64_t rows, int64_t columns, float *total) {
#pragma omp parallel for if (rows * columns > 1 << 14)
  for (int64_t column = 0; column < columns; column += LANES)
    for (int64_t row = 0; row < rows; row += LANES) {
      float block[LANES * LANES];
      int64_t high = least(LANES, rows - row), wide = least(LANES, columns - column);
      transpose(x + column * rows + row, rows, wide, high, block, LANES, LANES);
      for (int64_t r = 0; r < high; r++) {
        float *at = total + (row + r) * columns + column;
        store_some(at, load_some(at, wide, 0) + load(block + r * LANES), wide);
      }
    }
}

/* ------------------------------------------------------------------------------------------------------- sampling */

#define MAX_KEPT (1 << 18) /* logits that are kept, at most; more would leave the cache before they are read */

/* sums [columns, HALF] -> [columns, LANES] in place, 0 behind */
static void widen(float *sums, int64_t columns) {
  for (int64_t c = columns - 1; c >= 0; c--) {
    memmove(sums + c * LANES, sums + c * HALF, HALF * sizeof(float));
    memset(sums + c * LANES + HALF, 0, HALF * sizeof(float));
  }
}

/* sums [columns, wide] of a group: of each row the largest in peaks [wide], and in weights [wide] the sum of
   exp((x - peak) * factor) */
static void group_weights(const float *sums, int64_t columns, int64_t wide, float factor, float *peaks,
                          float *weights) {
  for (int64_t row = 0; row < wide; row += LANES) {
    vec peak = all(-INFINITY), total = all(0);
    for (int64_t c = 0; c < columns; c++) {
      vec x = load(sums + c * wide + row);
      peak = select(x > peak, x, peak);
    }
    vec from = select(peak == -INFINITY, all(0), peak); /* -infinity less itself is NaN */
    for (int64_t c = 0; c < columns; c++) total += vexp((load(sums + c * wide + row) - from) * factor);
    store(peaks + row, peak), store(weights + row, total);
  }
}

/* peaks, weights: [groups, wide] as those of `group_weights`; the weights become those relative to the largest of all
   groups, which is in most [wide] then */
static void common_weights(float *peaks, float *weights, int64_t groups, int64_t wide, float factor, float *most) {
  for (int64_t row = 0; row < wide; row += LANES) {
    vec peak = all(-INFINITY);
    for (int64_t g = 0; g < groups; g++) {
      vec x = load(peaks + g * wide + row);
      peak = select(x > peak, x, peak);
    }
    for (int64_t g = 0; g < groups; g++) {
      float *at = weights + g * wide + row;
      store(at, load(at) * vexp((load(peaks + g * wide + row) - peak) * factor));
    }
    store(most + row, peak);
  }
}

/* Where the sum of weights [count] exceeds `target`; the last that has weight if rounding leaves none above */
static int64_t first_above(const float *weights, int64_t count, double target) {
  double total = 0;
  for (int64_t j = 0; j < count; j++) {
    total += weights[j];
    if (total > target) return j;
  }
  while (count > 1 && weights[count - 1] == 0) count--;
  return count - 1;
}

/* What the rows of a block are sampled with, all [groups or size, wide] */
typedef struct {
  const float *kept; /* logits [columns, wide]; NULL: they are multiplied again */
  const float *weights, *most;
  int64_t wide;
} Block;

static inline float dot(const float *a, const float *b, int64_t n) {
  vec total = all(0);
  int64_t j = 0;
  for (; j + LANES <= n; j += LANES) total += load(a + j) * load(b + j);
  if (j < n) total += load_some(a + j, n - j, 0) * load_some(b + j, n - j, 0);
  return sum(total);
}

/* The token of row `row` of a block, x [size], at which the sum of weights exceeds `draw` times the total */
static void sample_row(const Block *block, int64_t row, const float *x, const float *head, double draw, int64_t columns,
                       int64_t size, float factor, int64_t *token, float *logprob) {
  const double below = 1 - 0x1p-52; /* rounding may leave nothing above the total */
  int64_t groups = (columns + GROUP - 1) / GROUP, wide = block->wide, g = 0;
  double total = 0, before = 0;
  for (int64_t i = 0; i < groups; i++) total += block->weights[i * wide + row];
  double target = draw * total < total * below ? draw * total : total * below;
  while (g < groups - 1 && !(before + block->weights[g * wide + row] > target))
    before += block->weights[g++ * wide + row];
  int64_t first = g * GROUP, count = least(GROUP, columns - first);
  float logits[GROUP], weights[GROUP], peak = block->most[row];
  for (int64_t c = 0; c < GROUP; c++)
    logits[c] = c >= count ? -INFINITY : block->kept ? block->kept[(first + c) * wide + row]
                                                     : dot(x, head + (first + c) * size, size);
  for (int64_t c = 0; c < GROUP; c += LANES) store(weights + c, vexp((load(logits + c) - peak) * factor));
  int64_t found = first_above(weights, count, target - before);
  *token = first + found;
  *logprob = (logits[found] - peak) * factor - (float)log(total);
}

/* For each row of x [rows, size], rows `x_row` apart, the first token at which the sum of the weights
   exp(x . head[token] / temperature) exceeds draws [rows] times their total, and its log-prob. head: [columns, size];
   tokens, logprobs: [rows]. Returns 1 without memory, else 0 */
int few_row_sample(const float *x, int64_t x_row, const float *head, const double *draws, int64_t rows, int64_t columns,
                   int64_t size, float temperature, int64_t *tokens, float *logprobs) {
  int64_t groups = (columns + GROUP - 1) / GROUP, all_rows = (rows + LANES - 1) / LANES * LANES;
  int64_t kept = columns * all_rows <= MAX_KEPT ? columns * all_rows : 0, floats = all_rows * (size + 2 * groups + 1);
  float *memory = aligned_alloc(64, ((floats + kept) * sizeof(float) + 63) / 64 * 64), factor = 1 / temperature;
  if (!memory) return 1;
  float *blocks = memory, *peaks = blocks + all_rows * size, *weights = peaks + all_rows * groups;
  float *most = weights + all_rows * groups, *logits = kept ? most + all_rows : NULL;
  if (rows > DOT_ROWS) transposed_blocks(x, x_row, rows, size, blocks);
#pragma omp parallel for if (rows * columns * size > 1 << 19)
  for (int64_t g = 0; g < groups; g++)
    for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
      float own[GROUP * BLOCK_ROWS] __attribute__((aligned(64)));
      int64_t wide = least(BLOCK_ROWS, all_rows - first), own_width = width(least(BLOCK_ROWS, rows - first));
      int64_t c = g * GROUP, count = least(GROUP, columns - c);
      float *sums = logits ? logits + first * columns + c * wide : own;
      if (rows > DOT_ROWS) {
        block_tiles(blocks + first * size, own_width, head + c * size, NULL, size, count, sums);
        if (own_width < wide) widen(sums, count);
      } else {
        memset(sums, 0, count * wide * sizeof(float));
        dot_products(x, x_row, head + c * size, NULL, rows, size, count, sums, 1, wide);
      }
      group_weights(sums, count, wide, factor, peaks + first * groups + g * wide, weights + first * groups + g * wide);
    }
  for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
    int64_t wide = least(BLOCK_ROWS, all_rows - first);
    common_weights(peaks + first * groups, weights + first * groups, groups, wide, factor, most + first);
  }
#pragma omp parallel for if (rows * GROUP * size > 1 << 19)
  for (int64_t row = 0; row < rows; row++) {
    int64_t first = row / BLOCK_ROWS * BLOCK_ROWS;
    Block block = {logits ? logits + first * columns : NULL, weights + first * groups, most + first,
                   least(BLOCK_ROWS, all_rows - first)};
    sample_row(&block, row - first, x + row * x_row, head, draws[row], columns, size, factor, tokens + row,
               logprobs + row);
  }
  free(memory);
  return 0;
}
