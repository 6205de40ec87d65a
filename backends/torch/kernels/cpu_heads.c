/* Log-probs of tokens from hidden states x [rows, size] and a head [columns, size] in float32, and their gradients, for
   `head_logprobs.py`.

   Logits of HEAD_ROWS rows and HEAD_COLUMNS columns are computed where the cache holds them, and become weights
   exp(logit - largest), or their own gradients, there. A table of all of them may be kept for the gradients, which then
   need not compute them again: blocks of columns one behind the other, each [rows, columns of the block]. Products are
   those of `cpu_panels.c`. A row has the same bits, whatever rows are with it and however many threads there are. */

#define HEAD_COLUMNS ((512 + PANEL - 1) / PANEL * PANEL) /* of a block */
#define HEAD_ROWS 96                       /* of a block: a multiple of TILE_ROWS */
#define HEAD_CHUNK 1024                    /* rows whose gradients of logits are kept for that of the head */

/* columns of a block of the head -> panels of its `size` terms, BLOCK_TERMS at a time. To be called by all threads */
static void pack_block(const float *head, int64_t size, int64_t columns, float *panels) {
  int64_t count = (columns + PANEL - 1) / PANEL;
#pragma omp for
  for (int64_t j = 0; j < count; j++)
    for (int64_t i = 0; i < size; i += BLOCK_TERMS) {
      int64_t terms = least(BLOCK_TERMS, size - i);
      pack_panel(head + j * PANEL * size + i, 1, size, terms, least(PANEL, columns - j * PANEL),
                 panels + (i * count + j * terms) * PANEL);
    }
}

/* terms of x, `x_term` apart, [terms, columns] -> panels, BLOCK_TERMS terms at a time. To be called by all threads */
static void pack_terms(const float *x, int64_t x_term, int64_t terms, int64_t columns, float *panels) {
  int64_t count = (columns + PANEL - 1) / PANEL;
#pragma omp for
  for (int64_t j = 0; j < count; j++)
    for (int64_t i = 0; i < terms; i += BLOCK_TERMS) {
      int64_t some = least(BLOCK_TERMS, terms - i);
      pack_panel(x + i * x_term + j * PANEL, x_term, 1, some, least(PANEL, columns - j * PANEL),
                 panels + (i * count + j * some) * PANEL);
    }
}

/* out [rows, columns], rows `out_row` apart, = x [rows, size] @ panels, or added to it */
static void multiply_panels(const float *x, int64_t x_row, int64_t rows, const float *panels, int64_t size,
                            int64_t columns, int adds, float *out, int64_t out_row) {
  int64_t count = (columns + PANEL - 1) / PANEL;
  for (int64_t i = 0; i < size; i += BLOCK_TERMS) {
    int64_t terms = least(BLOCK_TERMS, size - i);
    for (int64_t j = 0; j < count; j++)
      for (int64_t row = 0; row < rows; row += TILE_ROWS)
        panel_product(x + row * x_row + i, x_row, 1, panels + (i * count + j * terms) * PANEL, terms, NULL,
                      i == 0 && !adds, out + row * out_row + j * PANEL, out_row, least(TILE_ROWS, rows - row),
                      least(PANEL, columns - j * PANEL));
  }
}

/* What is known of a row so far: the largest logit, the sum of exp((logit - largest) * factor), the target's logit */
typedef struct {
  double sum;
  float peak, chosen;
} RowSums;

/* The logits [columns] of a block are added. target: a column of the block, or another number */
static void add_logits(RowSums *row, const float *logits, int64_t columns, int64_t target, float factor) {
  float most = row_max(logits, columns), peak = most > row->peak ? most : row->peak;
  float from = peak == -INFINITY ? 0 : peak; /* -infinity less itself is NaN */
  vec total = all(0);
  int64_t j = 0;
  for (; j + LANES <= columns; j += LANES) total += vexp((load(logits + j) - from) * factor);
  if (j < columns) total += vexp((load_some(logits + j, columns - j, -INFINITY) - from) * factor);
  row->sum = row->sum * vexp(all((row->peak - from) * factor))[0] + sum(total);
  row->peak = peak;
  if (target >= 0 && target < columns) row->chosen = logits[target];
}

/* Numbers of `memory` that the functions below want, for the gradients or for the statistics */
int head_memory(int64_t rows, int64_t size, int gradients) {
  int64_t wide = (size + PANEL - 1) / PANEL * PANEL, chunk = least(HEAD_CHUNK, rows);
  return gradients ? (size + wide + chunk) * HEAD_COLUMNS + chunk * wide
                   : size * HEAD_COLUMNS + rows * (int64_t)(sizeof(RowSums) / sizeof(float));
}

/* Of each row of x: the largest logit, the sum of exp(logit - largest), and the logit of its target, 0 where that is no
   column. A logit is a product times `factor`, which is positive. targets: [rows]; peaks, sums, chosen: [rows]; table:
   rows * columns numbers, or NULL, to keep the products; memory: see `head_memory` */
void head_statistics(const float *x, const float *head, const int64_t *targets, int64_t rows, int64_t columns,
                     int64_t size, float factor, float *peaks, float *sums, float *chosen, float *table,
                     float *memory) {
  RowSums *found = (RowSums *)memory; /* first, for its numbers of 8 bytes */
  float *panels = memory + rows * (sizeof(RowSums) / sizeof(float));
  for (int64_t row = 0; row < rows; row++) found[row] = (RowSums){0, -INFINITY, 0};
#pragma omp parallel if (rows * columns * size > 1 << 19)
  {
    float own[HEAD_ROWS * HEAD_COLUMNS] __attribute__((aligned(64)));
    for (int64_t c = 0; c < columns; c += HEAD_COLUMNS) {
      int64_t wide = least(HEAD_COLUMNS, columns - c);
      pack_block(head + c * size, size, wide, panels);
#pragma omp for
      for (int64_t first = 0; first < rows; first += HEAD_ROWS) {
        int64_t high = least(HEAD_ROWS, rows - first);
        float *logits = table ? table + c * rows + first * wide : own;
        multiply_panels(x + first * size, size, high, panels, size, wide, 0, logits, wide);
        for (int64_t row = 0; row < high; row++)
          add_logits(found + first + row, logits + row * wide, wide, targets[first + row] - c, factor);
      }
    }
  }
  for (int64_t row = 0; row < rows; row++)
    peaks[row] = found[row].peak * factor, sums[row] = found[row].sum, chosen[row] = found[row].chosen * factor;
}

/* The gradients of logits [columns] of a block, with weights exp(logit - normalizer): grad * (1[target] - weight), of
   products that are multiplied with `factor`. out: perhaps the logits */
static void logit_gradients(const float *logits, int64_t columns, int64_t target, float normalizer, float grad,
                            float factor, float *out) {
  float scale = grad * factor;
  int64_t j = 0;
  for (; j + LANES <= columns; j += LANES)
    store(out + j, vexp(load(logits + j) * factor - normalizer) * -scale);
  if (j < columns)
    store_some(out + j, vexp(load_some(logits + j, columns - j, 0) * factor - normalizer) * -scale, columns - j);
  if (target >= 0 && target < columns) out[target] += scale;
}

/* grad_head [columns, size] += slopes [terms, columns].T @ panels of x [terms, size]. gathered: HEAD_ROWS * BLOCK_TERMS
   of each thread. To be called by all threads */
static void add_head_gradients(const float *slopes, int64_t terms, int64_t columns, const float *panels, int64_t size,
                               float *gathered, float *grad_head) {
  int64_t count = (size + PANEL - 1) / PANEL;
#pragma omp for
  for (int64_t first = 0; first < columns; first += HEAD_ROWS)
    for (int64_t i = 0; i < terms; i += BLOCK_TERMS) {
      int64_t some = least(BLOCK_TERMS, terms - i), high = least(HEAD_ROWS, columns - first);
      gather_rows(slopes + i * columns + first, columns, high, some, gathered);
      for (int64_t j = 0; j < count; j++)
        for (int64_t row = 0; row < high; row += TILE_ROWS)
          panel_product(gathered + row * some, 1, TILE_ROWS, panels + (i * count + j * some) * PANEL, some, NULL, 0,
                        grad_head + (first + row) * size + j * PANEL, size, least(TILE_ROWS, high - row),
                        least(PANEL, size - j * PANEL));
    }
}

/* The gradients of log-probs, `grads` [rows]: grad_x [rows, size] is set, grad_head [columns, size] is added to; each
   may be NULL. normalizers: [rows], the logarithm of the sum of exp(logit) over all columns, also those of other heads;
   table: what `head_statistics` has kept, or NULL. The rest as there */
void head_gradients(const float *x, const float *head, const int64_t *targets, const float *normalizers,
                    const float *grads, const float *table, int64_t rows, int64_t columns, int64_t size, float factor,
                    float *grad_x, float *grad_head, float *memory) {
  int64_t wide_size = (size + PANEL - 1) / PANEL * PANEL, chunk = least(HEAD_CHUNK, rows);
  float *panels = memory, *across = panels + size * HEAD_COLUMNS; /* of a block of the head, to multiply x and slopes */
  float *slopes = across + wide_size * HEAD_COLUMNS, *inputs = slopes + chunk * HEAD_COLUMNS; /* panels of x */
#pragma omp parallel if (rows * columns * size > 1 << 19)
  {
    float gathered[HEAD_ROWS * BLOCK_TERMS] __attribute__((aligned(64)));
    for (int64_t begin = 0; begin < rows; begin += HEAD_CHUNK) {
      int64_t end = least(begin + HEAD_CHUNK, rows);
      if (grad_head) pack_terms(x + begin * size, size, end - begin, size, inputs);
      for (int64_t c = 0; c < columns; c += HEAD_COLUMNS) {
        int64_t wide = least(HEAD_COLUMNS, columns - c);
        if (!table) pack_block(head + c * size, size, wide, panels);
        if (grad_x) pack_terms(head + c * size, size, wide, size, across);
#pragma omp for
        for (int64_t first = begin; first < end; first += HEAD_ROWS) {
          float *own = slopes + (first - begin) * wide;
          const float *logits = table ? table + c * rows + first * wide : own;
          int64_t high = least(HEAD_ROWS, end - first);
          if (!table) multiply_panels(x + first * size, size, high, panels, size, wide, 0, own, wide);
          for (int64_t row = 0; row < high; row++)
            logit_gradients(logits + row * wide, wide, targets[first + row] - c, normalizers[first + row],
                            grads[first + row], factor, own + row * wide);
          if (grad_x) multiply_panels(own, wide, high, across, wide, size, c > 0, grad_x + first * size, size);
        }
        if (grad_head) add_head_gradients(slopes, end - begin, wide, inputs, size, gathered, grad_head + c * size);
      }
    }
  }
}
