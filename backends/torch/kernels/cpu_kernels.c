/* Kernels for float32 on CPUs, for `cpu_kernels.py`, which says what each of them computes.

   Rows are independent, so neither their number nor the number of threads changes a bit. */

#include "cpu_vectors.h"

#define BLOCK 256 /* tokens of the vocabulary whose weights are summed in float32 */
#define ROWS_AT_ONCE 64 /* that a thread takes; their products are summed and then added to a weight's gradient */

/* ---------------------------------------------------------------------------------------------------------- norms */

/* x, out: [rows, size]; weight: [size]; scale: [rows], or NULL */
void rms_norm(const float *x, const float *weight, int64_t rows, int64_t size, float eps, float *out, float *scale) {
#pragma omp parallel for if (rows * size > 1 << 15)
  for (int64_t row = 0; row < rows; row++) {
    const float *in = x + row * size;
    vec squares = all(0), more = all(0);
    int64_t j = 0;
    for (; j + 2 * LANES <= size; j += 2 * LANES) {
      vec a = load(in + j), b = load(in + j + LANES);
      squares += a * a, more += b * b;
    }
    for (; j < size; j += LANES) {
      vec a = load_up_to(in + j, size - j);
      squares += a * a;
    }
    float factor = 1.0f / sqrtf(sum(squares + more) / size + eps);
    if (scale) scale[row] = factor;
    float *result = out + row * size;
    for (j = 0; j < size; j += LANES)
      store_up_to(result + j, load_up_to(in + j, size - j) * factor * load_up_to(weight + j, size - j), size - j);
  }
}

/* A row of `rms_norm_backward`. grad_x may be NULL; part: what grad * normalized is added to, or NULL */
static inline void norm_row_backward(const float *grad, const float *x, float scale, const float *weight, int64_t size,
                                     float *grad_x, float *part) {
  vec products = all(0);
  for (int64_t j = 0; j < size; j += LANES) {
    vec own = load_up_to(grad + j, size - j) * (load_up_to(x + j, size - j) * scale);
    products += own * load_up_to(weight + j, size - j);
    if (part) store_up_to(part + j, load_up_to(part + j, size - j) + own, size - j);
  }
  if (!grad_x) return;
  float mean = sum(products) / size;
  for (int64_t j = 0; j < size; j += LANES) {
    vec of_normalized = load_up_to(grad + j, size - j) * load_up_to(weight + j, size - j);
    store_up_to(grad_x + j, (of_normalized - load_up_to(x + j, size - j) * scale * mean) * scale, size - j);
  }
}

/* grad_x [rows, size], or NULL, and grad_weight [size], or NULL. Rows are summed in blocks, and blocks in order, on any
   number of threads. Returns 1 without memory, else 0 */
int rms_norm_backward(const float *grad, const float *x, const float *scale, const float *weight, int64_t rows,
                      int64_t size, float *grad_x, float *grad_weight) {
  int64_t blocks = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  float *parts = grad_weight ? calloc(blocks * size + 1, sizeof(float)) : NULL;
  if (grad_weight && !parts) return 1;
#pragma omp parallel for if (rows * size > 1 << 15)
  for (int64_t block = 0; block < blocks; block++)
    for (int64_t row = block * ROWS_AT_ONCE; row < least((block + 1) * ROWS_AT_ONCE, rows); row++)
      norm_row_backward(grad + row * size, x + row * size, scale[row], weight, size,
                        grad_x ? grad_x + row * size : NULL, parts ? parts + block * size : NULL);
  if (!grad_weight) return 0;
  memset(grad_weight, 0, size * sizeof(float));
  for (int64_t block = 0; block < blocks; block++)
    add_to(parts + block * size, size, 1, grad_weight);
  free(parts);
  return 0;
}

/* --------------------------------------------------------------------------------------------- rotary embeddings */

/* Of tokens from `first` to `end`, as `rotary`. half and backward are constants where this is called */
static inline __attribute__((always_inline)) void rotate(const float *x, int64_t head_stride, int64_t token_stride,
                                                         const float *cos, const float *sin, int64_t heads,
                                                         int64_t first, int64_t end, const int64_t half,
                                                         const int backward, float *out) {
  for (int64_t t = first; t < end; t++) {
    const float *c1 = cos + t * 2 * half, *s1 = sin + t * 2 * half, *c2 = c1 + half, *s2 = s1 + half;
    for (int64_t h = 0; h < heads; h++) {
      const float *low = x + h * head_stride + t * token_stride, *high = low + half;
      float *result = out + (t * heads + h) * 2 * half;
      for (int64_t j = 0; j < half; j += LANES) {
        int64_t n = half - j;
        vec a = load_up_to(low + j, n), b = load_up_to(high + j, n);
        vec ac = a * load_up_to(c1 + j, n), bc = b * load_up_to(c2 + j, n);
        vec s = load_up_to(s1 + j, n), other = load_up_to(s2 + j, n);
        store_up_to(result + j, backward ? ac + b * other : ac - b * s, n);
        store_up_to(result + half + j, backward ? bc - a * s : bc + a * other, n);
      }
    }
  }
}

#define ROTATE(HALF) \
  backward ? rotate(x, head_stride, token_stride, cos, sin, heads, first, end, HALF, 1, out) \
           : rotate(x, head_stride, token_stride, cos, sin, heads, first, end, HALF, 0, out)

/* x: [heads, tokens, 2 * half] with strides; cos, sin: [tokens, 2 * half]; out: [tokens, heads, 2 * half] */
void rotary(const float *x, int64_t head_stride, int64_t token_stride, const float *cos, const float *sin, int64_t heads,
            int64_t tokens, int64_t half, int backward, float *out) {
#pragma omp parallel for if (heads * tokens * half > 1 << 14)
  for (int64_t first = 0; first < tokens; first += ROWS_AT_ONCE) {
    int64_t end = least(first + ROWS_AT_ONCE, tokens);
    switch (half) {
      case 8: ROTATE(8); break;
      case 16: ROTATE(16); break;
      case 32: ROTATE(32); break;
      case 64: ROTATE(64); break;
      default: ROTATE(half);
    }
  }
}

/* --------------------------------------------------------------------------------------------- feed-forward layers */

/* out = silu(gate) * up; silu may be NULL; [count] each */
void gated_product(const float *gate, const float *up, int64_t count, float *out) {
#pragma omp parallel for if (count > 1 << 14)
  for (int64_t j = 0; j < count; j += LANES) {
    vec a = load_up_to(gate + j, count - j), b = load_up_to(up + j, count - j);
    store_up_to(out + j, a / (1.0f + vexp(-a)) * b, count - j);
  }
}

void gated_product_backward(const float *gate, const float *up, const float *grad, int64_t count, float *grad_gate,
                            float *grad_up) {
#pragma omp parallel for if (count > 1 << 14)
  for (int64_t j = 0; j < count; j += LANES) {
    int64_t n = count - j;
    vec a = load_up_to(gate + j, n), b = load_up_to(up + j, n), g = load_up_to(grad + j, n);
    vec share = 1.0f / (1.0f + vexp(-a));
    store_up_to(grad_gate + j, g * b * share * (1.0f + a * (1.0f - share)), n);
    store_up_to(grad_up + j, g * a * share, n);
  }
}

/* out = a + b; [count] each */
void add(const float *a, const float *b, int64_t count, float *out) {
#pragma omp parallel for if (count > 1 << 15)
  for (int64_t j = 0; j < count; j += LANES)
    store_up_to(out + j, load_up_to(a + j, count - j) + load_up_to(b + j, count - j), count - j);
}

/* ------------------------------------------------------------------------------------------------- vocabularies */

/* The sum over a row of exp((x - peak) / temperature), with the sum up to each block of columns in `cumulative` if that
   is not NULL. kept: what the row becomes is written there, if it is not NULL */
static inline __attribute__((always_inline)) double weight_sum(const float *x, int64_t columns, float peak,
                                                               float temperature, double *cumulative, float *kept) {
  double total = 0;
  for (int64_t first = 0, b = 0; first < columns; first += BLOCK, b++) {
    int64_t end = least(first + BLOCK, columns), j = first;
    vec part = all(0);
    for (; j + LANES <= end; j += LANES) {
      vec a = load(x + j) - peak, w = vexp(temperature == 1 ? a : a / temperature);
      if (kept) store(kept + j, w);
      part += w;
    }
    if (j < end) {
      vec w = vexp((load_some(x + j, end - j, -INFINITY) - peak) / temperature);
      if (kept) store_some(kept + j, w, end - j);
      part += w;
    }
    total += sum(part);
    if (cumulative) cumulative[b] = total;
  }
  return total;
}

/* sums [rows] of exp(x - peak) over the columns of x [rows, columns]; peak: [rows] */
void exp_sums(const float *x, const float *peak, int64_t rows, int64_t columns, float *sums) {
#pragma omp parallel for if (rows * columns > 1 << 14)
  for (int64_t row = 0; row < rows; row++)
    sums[row] = weight_sum(x + row * columns, columns, peak[row], 1, NULL, NULL);
}

/* peaks [rows]: the largest of each row of x [rows, columns]; sums [rows] of exp(x - peak), which x becomes if it is
   kept. A row stays in the cache from one pass to the next */
void softmax_sums(float *x, int64_t rows, int64_t columns, int keep, float *peaks, float *sums) {
#pragma omp parallel for if (rows * columns > 1 << 14)
  for (int64_t row = 0; row < rows; row++) {
    float *at = x + row * columns, peak = peaks[row] = row_max(at, columns);
    sums[row] = keep ? weight_sum(at, columns, peak, 1, NULL, at) : weight_sum(at, columns, peak, 1, NULL, NULL);
  }
}

/* x [rows, columns] becomes exp(x - normalizer) * factor; normalizer, factor: [rows] */
void scaled_probabilities(float *x, const float *normalizer, const float *factor, int64_t rows, int64_t columns) {
#pragma omp parallel for if (rows * columns > 1 << 14)
  for (int64_t row = 0; row < rows; row++) {
    float *at = x + row * columns;
    int64_t j = 0;
    for (; j + LANES <= columns; j += LANES) store(at + j, vexp(load(at + j) - normalizer[row]) * factor[row]);
    if (j < columns)
      store_some(at + j, vexp(load_some(at + j, columns - j, 0) - normalizer[row]) * factor[row], columns - j);
  }
}

/* For each row of logits [rows, columns] the first token at which the sum of the weights exp(logit / temperature)
   exceeds draws [rows] times their total; tokens, logprobs: [rows]. Returns 1 without memory, else 0 */
int sample(const float *logits, const double *draws, int64_t rows, int64_t columns, float temperature, int64_t *tokens,
           float *logprobs) {
  const double below = 1 - 0x1p-52; /* rounding may leave nothing above the total */
  int64_t blocks = (columns + BLOCK - 1) / BLOCK;
  int failed = 0;
#pragma omp parallel for if (rows * columns > 1 << 14)
  for (int64_t row = 0; row < rows; row++) {
    const float *x = logits + row * columns;
    double few[512], *cumulative = blocks <= 512 ? few : malloc(blocks * sizeof(double));
    if (!cumulative) {
#pragma omp atomic write
      failed = 1;
      continue;
    }
    float peak = row_max(x, columns);
    double total = weight_sum(x, columns, peak, temperature, cumulative, NULL);
    double target = draws[row] * total < total * below ? draws[row] * total : total * below;
    int64_t b = 0;
    while (b < blocks - 1 && !(cumulative[b] > target)) b++;
    double before = b ? cumulative[b - 1] : 0, so_far = 0;
    int64_t first = b * BLOCK, count = columns - first < BLOCK ? columns - first : BLOCK, found = count - 1;
    float weights[BLOCK];
    for (int64_t j = 0; j < count; j += LANES) {
      int64_t n = count - j;
      vec a = (n < LANES ? load_some(x + first + j, n, -INFINITY) : load(x + first + j)) - peak;
      vec w = vexp(a / temperature);
      if (n < LANES)
        store_some(weights + j, w, n);
      else
        store(weights + j, w);
    }
    while (found > 0 && weights[found] == 0) found--; /* if rounding leaves none above: the last that has weight */
    for (int64_t j = 0; j < count; j++) {
      so_far += weights[j];
      if (so_far > target - before) {
        found = j;
        break;
      }
    }
    tokens[row] = first + found;
    logprobs[row] = (x[first + found] - peak) / temperature - (float)log(total);
    if (cumulative != few) free(cumulative);
  }
  return failed;
}

/* ------------------------------------------------------------------------------------------------ decode attention */

#define SHORT (1 << 12) /* numbers of the keys of a head and sequence */

/* into the second cache: the first can wait for fewer lines at a time */
static inline void fetch(const float *x) { __builtin_prefetch(x, 0, 2); }

/* sums that do not wait for one another: as many as fit into registers */
#define CHAINS(SIZE) ((SIZE) / LANES >= 8 ? 1 : (SIZE) / LANES >= 4 ? 2 : 4)

/* Scores of `queries` heads [queries, size], which share keys [tokens, size], in scores [queries, stride]. SIZE: of a
   head, known to the compiler. next: what is read after this, as long; NULL: it need not be fetched */
#define SCORES(SIZE)                                                                                                  \
  static void scores_##SIZE(const float *q, int64_t q_stride, const float *keys, int64_t tokens, int64_t queries,     \
                            float scale, const float *next, float *scores, int64_t stride) {                          \
    for (int64_t g = 0; g < queries; g++) {                                                                           \
      vec own[SIZE / LANES];                                                                                          \
      for (int j = 0; j < SIZE / LANES; j++) own[j] = load(q + g * q_stride + j * LANES) * scale;                     \
      for (int64_t t = 0; t < tokens; t += LANES) {                                                                   \
        vec products[LANES];                                                                                          \
        for (int i = 0; next && g == 0 && i < LANES * SIZE; i += LINE) fetch(next + t * SIZE + i);                    \
        for (int i = 0; i < LANES; i++) {                                                                             \
          const float *key = keys + (t + i < tokens ? t + i : tokens - 1) * SIZE;                                     \
          products[i] = own[0] * load(key);                                                                           \
          for (int j = 1; j < SIZE / LANES; j++) products[i] += own[j] * load(key + j * LANES);                       \
        }                                                                                                             \
        store(scores + g * stride + t, sums_of(products, LANES));                                                     \
      }                                                                                                               \
    }                                                                                                                 \
  }                                                                                                                   \
  static void values_##SIZE(const float *weights, const float *values, int64_t tokens, float factor,                  \
                            const float *next, float *out) {                                                          \
    vec sums[CHAINS(SIZE)][SIZE / LANES];                                                                             \
    for (int i = 0; i < CHAINS(SIZE); i++)                                                                            \
      for (int j = 0; j < SIZE / LANES; j++) sums[i][j] = all(0);                                                     \
    int64_t t = 0;                                                                                                    \
    for (; t + CHAINS(SIZE) <= tokens; t += CHAINS(SIZE)) {                                                           \
      for (int i = 0; next && i < CHAINS(SIZE) * SIZE; i += LINE) fetch(next + t * SIZE + i);                         \
      for (int i = 0; i < CHAINS(SIZE); i++)                                                                          \
        for (int j = 0; j < SIZE / LANES; j++) sums[i][j] += load(values + (t + i) * SIZE + j * LANES) * weights[t + i];\
    }                                                                                                                 \
    for (; t < tokens; t++)                                                                                           \
      for (int j = 0; j < SIZE / LANES; j++) sums[0][j] += load(values + t * SIZE + j * LANES) * weights[t];          \
    for (int i = 1; i < CHAINS(SIZE); i++)                                                                            \
      for (int j = 0; j < SIZE / LANES; j++) sums[0][j] += sums[i][j];                                                \
    for (int j = 0; j < SIZE / LANES; j++) store(out + j * LANES, sums[0][j] * factor);                               \
  }

SCORES(16)
SCORES(32)
SCORES(48)
SCORES(64)
SCORES(80)
SCORES(96)
SCORES(128)

typedef void (*scores_function)(const float *, int64_t, const float *, int64_t, int64_t, float, const float *, float *,
                                int64_t);
typedef void (*values_function)(const float *, const float *, int64_t, float, const float *, float *);

#define CASE(SIZE) \
  case SIZE:       \
    get_scores = scores_##SIZE, get_values = values_##SIZE; break;

/* Writes one token of each sequence to the cache and attends to what is there. q: [heads, sequences, size] with strides;
   k, v: [kv_heads, sequences, size] with strides; keys, values: [sequences, kv_heads, width, size], where `slot` is the
   distance between two sequences; positions: [sequences], of the new tokens; window: how many tokens one sees at most;
   out: [sequences, heads, size]. Returns 1 without memory, or if it has no code for the size, else 0. */
int decode_attention(const float *q, int64_t q_head, int64_t q_seq, const float *k, int64_t k_head, int64_t k_seq,
                     const float *v, int64_t v_head, int64_t v_seq, float *keys, float *values, int64_t slot,
                     const int64_t *positions, int64_t sequences, int64_t heads, int64_t kv_heads, int64_t width,
                     int64_t size, float scale, int64_t window, float *out) {
  scores_function get_scores;
  values_function get_values;
  switch (size) {
    CASE(16) CASE(32) CASE(48) CASE(64) CASE(80) CASE(96) CASE(128)
    default: return 1;
  }
#undef CASE
  int64_t queries = heads / kv_heads, stride = (width + LANES - 1) / LANES * LANES;
  int failed = 0;
#pragma omp parallel if (sequences * heads * width * size > 1 << 16)
  {
    float *scores = malloc(queries * stride * sizeof(float));
    if (!scores)
#pragma omp atomic write
      failed = 1;
#pragma omp for collapse(2)
    for (int64_t s = 0; s < sequences; s++)
      for (int64_t h = 0; h < kv_heads; h++) {
        if (!scores) continue;
        int64_t last = positions[s] < width ? positions[s] : width - 1;
        int64_t first = last + 1 > window ? last + 1 - window : 0, tokens = last + 1 - first;
        float *own_keys = keys + s * slot + h * width * size, *own_values = values + s * slot + h * width * size;
        /* of keys and values that are long enough, the processor fetches most itself */
        int is_short = tokens * size < SHORT && s + 1 < sequences;
        const float *next = (h + 1 < kv_heads ? own_keys + width * size : keys + (s + 1) * slot) + first * size;
        memcpy(own_keys + last * size, k + h * k_head + s * k_seq, size * sizeof(float));
        memcpy(own_values + last * size, v + h * v_head + s * v_seq, size * sizeof(float));
        get_scores(q + h * queries * q_head + s * q_seq, q_head, own_keys + first * size, tokens, queries, scale,
                   is_short ? own_values + first * size : NULL, scores, stride);
        for (int64_t g = 0; g < queries; g++) {
          float *weights = scores + g * stride, peak = row_max(weights, tokens);
          vec total = all(0);
          int64_t t = 0;
          for (; t + LANES <= tokens; t += LANES) {
            vec w = vexp(load(weights + t) - peak);
            total += w;
            store(weights + t, w);
          }
          if (t < tokens) {
            vec w = vexp(load_some(weights + t, tokens - t, -INFINITY) - peak);
            total += w;
            store(weights + t, w);
          }
          get_values(weights, own_values + first * size, tokens, 1 / sum(total), is_short && !g ? next : NULL,
                     out + (s * heads + h * queries + g) * size);
        }
      }
    free(scores);
  }
  return failed;
}

#include "cpu_angles.c"
#include "cpu_attention.c"
#include "cpu_optimizers.c"
#include "cpu_panels.c"
#include "cpu_heads.c"
#include "cpu_lookups.c"
#include "cpu_products.c"
#include "cpu_layers.c"
#include "cpu_sampled_tokens.c"
#include "cpu_calls.c"
