/* Causal attention of packed sequences in float32 with its gradient, for `cpu_attention.py`.

   A segment is a run of queries, whose own keys stand at the same rows; before them come the keys of a prefix, perhaps
   none. A query sees the keys of its segment up to its own, in a window. Segments of one group may share a prefix, of
   which the group has the owner, as a segment without prefix that comes before those that use it.

   Of a segment keys and values are copied to memory of their own, once as they are and once transposed, and queries
   are taken in blocks; all that is left are products of small matrices, by one function (`tile`). Probabilities are
   computed again in the backward pass. A sum has one order, whatever the number of threads. */

#include "cpu_vectors.h"

#define ROWS 6                  /* of a tile */
#define COLUMNS 16              /* of a tile, and what rows of matrices are multiples of */
#define VECTORS (COLUMNS / LANES)
#define QUERIES (8 * ROWS)      /* of a block */

typedef struct {
  int64_t query, queries, prefix, prefixed; /* the first of its rows, and their number; the same of its prefix */
} Segment;

/* x of head h and token t is at data + h * head + t * token */
typedef struct {
  const float *data;
  int64_t head, token;
} Heads;

static inline int64_t up(int64_t n) { return (n + COLUMNS - 1) / COLUMNS * COLUMNS; }

/* c [rows, COLUMNS] = a [rows, n] @ b [n, COLUMNS], added to c if `add`. An element of a is a[row * a_row + i * a_step]
 */
static inline __attribute__((always_inline)) void tile_of(const float *a, int64_t a_row, int64_t a_step, const float *b,
                                                          int64_t b_row, int64_t n, float *c, int64_t c_row, int add,
                                                          const int rows) {
  vec sums[ROWS][VECTORS];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) sums[r][v] = add ? load(c + r * c_row + v * LANES) : all(0);
  for (int64_t i = 0; i < n; i++) {
    vec own[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) own[v] = load(b + i * b_row + v * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) sums[r][v] += own[v] * a[r * a_row + i * a_step];
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) store(c + r * c_row + v * LANES, sums[r][v]);
}

static void tile(const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_row, int64_t n, float *c,
                 int64_t c_row, int add, int64_t rows) {
  switch (rows) {
    case 1: tile_of(a, a_row, a_step, b, b_row, n, c, c_row, add, 1); break;
    case 2: tile_of(a, a_row, a_step, b, b_row, n, c, c_row, add, 2); break;
    case 3: tile_of(a, a_row, a_step, b, b_row, n, c, c_row, add, 3); break;
    case 4: tile_of(a, a_row, a_step, b, b_row, n, c, c_row, add, 4); break;
    case 5: tile_of(a, a_row, a_step, b, b_row, n, c, c_row, add, 5); break;
    default: tile_of(a, a_row, a_step, b, b_row, n, c, c_row, add, 6);
  }
}

/* What a thread computes with. size, value_size, and their multiples of COLUMNS; stride: of what has a column for each
   key */
typedef struct {
  float *memory, *keys, *values, *keys_across, *values_across, *grad_keys, *grad_values;
  float *queries, *grads, *scores, *slopes, *result;
  int64_t size, value_size, width, value_width, stride;
} Work;

static int begin(Work *w, int64_t longest, int64_t size, int64_t value_size, int backward) {
  w->size = size, w->value_size = value_size, w->width = up(size), w->value_width = up(value_size);
  w->stride = up(longest) + COLUMNS; /* no power of two, whose rows would share a part of the cache */
  int64_t wide = w->width > w->value_width ? w->width : w->value_width, keys = w->stride;
  int64_t sizes[] = {keys * w->width, keys * w->value_width, size * keys, backward ? value_size * keys : 0,
                     backward ? keys * w->width : 0, backward ? keys * w->value_width : 0, QUERIES * w->width,
                     backward ? QUERIES * w->value_width : 0, QUERIES * keys, backward ? QUERIES * keys : 0,
                     QUERIES * wide};
  float **parts[] = {&w->keys, &w->values, &w->keys_across, &w->values_across, &w->grad_keys, &w->grad_values,
                     &w->queries, &w->grads, &w->scores, &w->slopes, &w->result};
  int64_t total = 0;
  for (int i = 0; i < 11; i++) total += sizes[i];
  float *at = w->memory = calloc(total, sizeof(float)); /* what is behind the last column is read */
  for (int i = 0; at && i < 11; at += sizes[i++]) *parts[i] = at;
  return w->memory == NULL;
}

/* rows [n, size] of one head -> out [n, width], 0 behind `size`; times `factor` */
static void copy_rows(const float *from, int64_t token, int64_t n, int64_t size, int64_t width, float factor,
                      float *out) {
  for (int64_t t = 0; t < n; t++) {
    for (int64_t j = 0; j < size; j++) out[t * width + j] = from[t * token + j] * factor;
    for (int64_t j = size; j < width; j++) out[t * width + j] = 0;
  }
}

/* x [n, size] with rows of `width` -> out [size, n] with rows of `stride`; columns up to a multiple of COLUMNS are 0 */
static void turn(const float *x, int64_t n, int64_t size, int64_t width, int64_t stride, float *out) {
  for (int64_t first = 0; first < up(n); first += LANES)
    for (int64_t j = 0; j < size; j += LANES)
      transpose(x + first * width + j, width, least(LANES, n - first), least(LANES, size - j), out + j * stride + first,
                stride, LANES);
}

static void take_keys(Work *w, const Segment *s, Heads k, Heads v, int64_t head, int backward) {
  const float *keys = k.data + head * k.head, *values = v.data + head * v.head;
  int64_t n = s->prefixed + s->queries;
  copy_rows(keys + s->prefix * k.token, k.token, s->prefixed, w->size, w->width, 1, w->keys);
  copy_rows(keys + s->query * k.token, k.token, s->queries, w->size, w->width, 1, w->keys + s->prefixed * w->width);
  copy_rows(values + s->prefix * v.token, v.token, s->prefixed, w->value_size, w->value_width, 1, w->values);
  copy_rows(values + s->query * v.token, v.token, s->queries, w->value_size, w->value_width, 1,
            w->values + s->prefixed * w->value_width);
  turn(w->keys, n, w->size, w->width, w->stride, w->keys_across);
  if (backward) turn(w->values, n, w->value_size, w->value_width, w->stride, w->values_across);
}

/* the first key that the query at `place` of its sequence sees */
static inline int64_t first_seen(int64_t place, int64_t window) { return place + 1 > window ? place + 1 - window : 0; }

/* out [rows, stride] = a [rows, width] @ across [size, stride], at least where queries from `place` on see keys */
static void products(const float *a, int64_t width, int64_t size, const float *across, int64_t stride, int64_t rows,
                     int64_t place, int64_t window, float *out) {
  int64_t first = first_seen(place, window) / COLUMNS * COLUMNS;
  for (int64_t column = first; column < place + rows; column += COLUMNS)
    for (int64_t r = 0; r < rows; r += ROWS) {
      int64_t count = least(ROWS, rows - r);
      if (column < place + r + count && column + COLUMNS > first_seen(place + r, window))
        tile(a + r * width, width, 1, across + column, stride, size, out + r * stride + column, stride, 0, count);
    }
}

/* out [rows, width] = weights [rows, stride] @ x [keys, width], of the keys that queries from `place` on see */
static void sums(const float *weights, int64_t stride, const float *x, int64_t width, int64_t rows, int64_t place,
                 int64_t window, float *out) {
  for (int64_t column = 0; column < width; column += COLUMNS)
    for (int64_t r = 0; r < rows; r += ROWS) {
      int64_t count = least(ROWS, rows - r), first = first_seen(place + r, window);
      tile(weights + r * stride + first, stride, 1, x + first * width + column, width, place + r + count - first,
           out + r * width + column, width, 0, count);
    }
}

/* total [keys, width] += weights [rows, stride]^T @ x [rows, width], of the keys first..end */
static void add_sums(const float *weights, int64_t stride, const float *x, int64_t width, int64_t rows, int64_t first,
                     int64_t end, float *total) {
  for (int64_t column = 0; column < width; column += COLUMNS)
    for (int64_t key = first; key < end; key += ROWS)
      tile(weights + key, 1, stride, x + column, width, rows, total + key * width + column, width, 1,
           least(ROWS, end - key));
}

/* The columns of whole vectors that `products` has computed for a row, and what its query sees of them */
typedef struct {
  int64_t first, from, to, end;
} Seen;

static inline Seen seen_by(int64_t r, int64_t rows, int64_t place, int64_t window) {
  int64_t tile_row = r / ROWS * ROWS;
  return (Seen){first_seen(place + tile_row, window) / COLUMNS * COLUMNS, first_seen(place + r, window), place + r + 1,
                up(place + least(tile_row + ROWS, rows))};
}

static inline void fill(float *x, int64_t from, int64_t to, float value) {
  for (int64_t j = from; j < to; j++) x[j] = value;
}

/* what a query does not see becomes -infinity, of which exp is 0 */
static inline void hide(float *row, Seen s) {
  fill(row, s.first, s.from, -INFINITY);
  fill(row, s.to, s.end, -INFINITY);
}

static inline float dot(const float *a, const float *b, int64_t n) {
  vec total = all(0);
  int64_t j = 0;
  for (; j + LANES <= n; j += LANES) total += load(a + j) * load(b + j);
  if (j < n) total += load_some(a + j, n - j, 0) * load_some(b + j, n - j, 0);
  return sum(total);
}

static void forward_segment(Work *w, const Segment *s, Heads q, int64_t head, int64_t heads, float scale,
                            int64_t window, float *out, float *normalizers) {
  for (int64_t done = 0; done < s->queries; done += QUERIES) {
    int64_t rows = least(QUERIES, s->queries - done), place = s->prefixed + done, row = s->query + done;
    copy_rows(q.data + head * q.head + row * q.token, q.token, rows, w->size, w->width, scale, w->queries);
    products(w->queries, w->width, w->size, w->keys_across, w->stride, rows, place, window, w->scores);
    float factors[QUERIES];
    for (int64_t r = 0; r < rows; r++) {
      Seen seen = seen_by(r, rows, place, window);
      float *own = w->scores + r * w->stride;
      hide(own, seen);
      float peak = row_max(own + seen.first, seen.end - seen.first);
      vec total = all(0);
      for (int64_t j = seen.first; j < seen.end; j += LANES) {
        vec weight = vexp(load(own + j) - peak);
        total += weight;
        store(own + j, weight);
      }
      float whole = sum(total);
      factors[r] = 1 / whole;
      normalizers[(row + r) * heads + head] = peak + logf(whole);
    }
    sums(w->scores, w->stride, w->values, w->value_width, rows, place, window, w->result);
    for (int64_t r = 0; r < rows; r++)
      copy_rows(w->result + r * w->value_width, 0, 1, w->value_size, w->value_size, factors[r],
                out + ((row + r) * heads + head) * w->value_size);
  }
}

static void backward_segment(Work *w, const Segment *s, Heads q, Heads grad, int64_t head, int64_t heads, float scale,
                             int64_t window, const float *out, const float *normalizers, float *grad_q) {
  for (int64_t done = 0; done < s->queries; done += QUERIES) {
    int64_t rows = least(QUERIES, s->queries - done), place = s->prefixed + done, row = s->query + done;
    int64_t first = first_seen(place, window), end = place + rows;
    copy_rows(q.data + head * q.head + row * q.token, q.token, rows, w->size, w->width, scale, w->queries);
    copy_rows(grad.data + head * grad.head + row * grad.token, grad.token, rows, w->value_size, w->value_width, 1,
              w->grads);
    products(w->queries, w->width, w->size, w->keys_across, w->stride, rows, place, window, w->scores);
    products(w->grads, w->value_width, w->value_size, w->values_across, w->stride, rows, place, window, w->slopes);
    for (int64_t r = 0; r < rows; r++) {
      Seen seen = seen_by(r, rows, place, window);
      float *own = w->scores + r * w->stride, *slope = w->slopes + r * w->stride;
      float given = dot(out + ((row + r) * heads + head) * w->value_size, w->grads + r * w->value_width, w->value_size);
      float normalizer = normalizers[(row + r) * heads + head];
      hide(own, seen);
      for (int64_t j = seen.first; j < seen.end; j += LANES) {
        vec weight = vexp(load(own + j) - normalizer);
        store(own + j, weight);
        store(slope + j, weight * (load(slope + j) - given));
      }
      fill(own, first, seen.first, 0), fill(slope, first, seen.first, 0);
      fill(own, seen.end, end, 0), fill(slope, seen.end, end, 0);
    }
    add_sums(w->scores, w->stride, w->grads, w->value_width, rows, first, end, w->grad_values);
    add_sums(w->slopes, w->stride, w->queries, w->width, rows, first, end, w->grad_keys);
    sums(w->slopes, w->stride, w->keys, w->width, rows, place, window, w->result);
    for (int64_t r = 0; r < rows; r++)
      copy_rows(w->result + r * w->width, 0, 1, w->size, w->size, scale, grad_q + ((row + r) * heads + head) * w->size);
  }
}

/* Gradients of a segment's keys or values [keys, width] to rows [tokens, kv_heads, size]: its own are set, those of its
   prefix, which its owner has set, are added */
static void give(const Segment *s, const float *x, int64_t width, int64_t size, int64_t head, int64_t kv_heads,
                 float *to) {
  for (int64_t t = 0; t < s->prefixed; t++) {
    float *at = to + ((s->prefix + t) * kv_heads + head) * size;
    for (int64_t j = 0; j < size; j++) at[j] += x[t * width + j];
  }
  for (int64_t t = 0; t < s->queries; t++)
    memcpy(to + ((s->query + t) * kv_heads + head) * size, x + (s->prefixed + t) * width, size * sizeof(float));
}

static int64_t longest_of(const Segment *segments, int64_t count) {
  int64_t found = 1;
  for (int64_t i = 0; i < count; i++) {
    int64_t n = segments[i].prefixed + segments[i].queries;
    found = n > found ? n : found;
  }
  return found;
}

/* q: [heads, tokens, size], k: [kv_heads, tokens, size], v: [kv_heads, tokens, value_size], each with the distances of
   heads and of tokens; segments: [groups[group_count], 4], each group from groups[i] to groups[i + 1]; out: [tokens,
   heads, value_size]; normalizers: [tokens, heads]. Returns 1 if there is not enough memory, else 0 */
int attention(const float *q, int64_t q_head, int64_t q_token, const float *k, int64_t k_head, int64_t k_token,
              const float *v, int64_t v_head, int64_t v_token, const Segment *segments, const int64_t *groups,
              int64_t group_count, int64_t heads, int64_t kv_heads, int64_t size, int64_t value_size, float scale,
              int64_t window, float *out, float *normalizers) {
  int64_t count = groups[group_count], longest = longest_of(segments, count), queries = heads / kv_heads;
  int failed = 0;
#pragma omp parallel if (count * kv_heads > 1)
  {
    Work w;
    int missing = begin(&w, longest, size, value_size, 0);
    if (missing)
#pragma omp atomic write
      failed = 1;
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t i = 0; i < count; i++)
      for (int64_t h = 0; h < kv_heads; h++) {
        if (missing) continue;
        take_keys(&w, segments + i, (Heads){k, k_head, k_token}, (Heads){v, v_head, v_token}, h, 0);
        for (int64_t g = h * queries; g < (h + 1) * queries; g++)
          forward_segment(&w, segments + i, (Heads){q, q_head, q_token}, g, heads, scale, window, out, normalizers);
      }
    free(w.memory);
  }
  return failed;
}

/* The gradients of q [tokens, heads, size], k [tokens, kv_heads, size] and v [tokens, kv_heads, value_size] from that of
   the result, `grad`, [tokens, heads, value_size] with distances. The rest as of `attention` */
int attention_backward(const float *q, int64_t q_head, int64_t q_token, const float *k, int64_t k_head, int64_t k_token,
                       const float *v, int64_t v_head, int64_t v_token, const float *grad, int64_t grad_head,
                       int64_t grad_token, const Segment *segments, const int64_t *groups, int64_t group_count,
                       int64_t heads, int64_t kv_heads, int64_t size, int64_t value_size, float scale, int64_t window,
                       const float *out, const float *normalizers, float *grad_q, float *grad_k, float *grad_v) {
  int64_t longest = longest_of(segments, groups[group_count]), queries = heads / kv_heads;
  int failed = 0;
#pragma omp parallel if (group_count * kv_heads > 1)
  {
    Work w;
    int missing = begin(&w, longest, size, value_size, 1);
    if (missing)
#pragma omp atomic write
      failed = 1;
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t group = 0; group < group_count; group++)
      for (int64_t h = 0; h < kv_heads; h++)
        for (int64_t i = groups[group]; i < groups[group + 1] && !missing; i++) {
          const Segment *s = segments + i;
          int64_t n = s->prefixed + s->queries;
          take_keys(&w, s, (Heads){k, k_head, k_token}, (Heads){v, v_head, v_token}, h, 1);
          memset(w.grad_keys, 0, n * w.width * sizeof(float));
          memset(w.grad_values, 0, n * w.value_width * sizeof(float));
          for (int64_t g = h * queries; g < (h + 1) * queries; g++)
            backward_segment(&w, s, (Heads){q, q_head, q_token}, (Heads){grad, grad_head, grad_token}, g, heads, scale,
                             window, out, normalizers, grad_q);
          give(s, w.grad_keys, w.width, size, h, kv_heads, grad_k);
          give(s, w.grad_values, w.value_width, value_size, h, kv_heads, grad_v);
        }
    free(w.memory);
  }
  return failed;
}
