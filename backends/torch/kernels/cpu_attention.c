/* Causal attention of packed sequences in float32 with its gradient, for `cpu_attention.py`.

   A segment is a run of queries, whose own keys stand at the same rows; before them come the keys of a prefix, perhaps
   none. A query sees the keys of its segment up to its own, in a window. Segments of one group may share a prefix, of
   which the group has the owner, as a segment without prefix that comes before those that use it.

   Of a segment keys and values are copied to memory of their own, and queries are taken in blocks, transposed; all that
   is left are products of small matrices, by one function (`tile`). Tables of scores have a row for each key and a
   column for each query of a block, so that a vector holds scores of neighboring queries, and largest scores and sums
   over keys are made without mixing its lanes. Probabilities are computed again in the backward pass. A sum has one
   order, whatever the number of threads. */

#include "cpu_vectors.h"

#define ROWS 6                  /* of a tile */
#define COLUMNS 16              /* of a tile, and what rows of matrices are multiples of */
#define VECTORS (COLUMNS / LANES)
#define QUERIES (3 * COLUMNS)   /* of a block: columns of a table of scores */

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

/* What a thread computes with. size, value_size, and their multiples of COLUMNS */
typedef struct {
  float *memory, *keys, *values, *grad_keys, *grad_values; /* [keys, width] */
  float *queries, *grads, *result;                         /* of a block: [QUERIES, width] */
  float *queries_across, *grads_across;                    /* the same: [width, QUERIES] */
  float *scores, *slopes;                                  /* [keys, QUERIES] */
  int64_t size, value_size, width, value_width;
} Work;

static int begin(Work *w, int64_t longest, int64_t size, int64_t value_size, int backward) {
  w->size = size, w->value_size = value_size, w->width = up(size), w->value_width = up(value_size);
  int64_t width = w->width, value_width = w->value_width, wide = width > value_width ? width : value_width;
  int64_t sizes[] = {longest * width, longest * value_width, backward ? longest * width : 0,
                     backward ? longest * value_width : 0, backward ? QUERIES * width : 0,
                     backward ? QUERIES * value_width : 0, QUERIES * wide, QUERIES * width,
                     backward ? QUERIES * value_width : 0, longest * QUERIES, backward ? longest * QUERIES : 0};
  float **parts[] = {&w->keys, &w->values, &w->grad_keys, &w->grad_values, &w->queries, &w->grads, &w->result,
                     &w->queries_across, &w->grads_across, &w->scores, &w->slopes};
  int64_t total = 0;
  for (int i = 0; i < 11; i++) total += sizes[i];
  float *at = w->memory = calloc(total, sizeof(float)); /* what is behind the last column is read */
  for (int i = 0; at && i < 11; at += sizes[i++]) *parts[i] = at;
  return w->memory == NULL;
}

/* rows [n, size] that are `token` apart -> out [n, size] with rows of `width`; times `factor` */
static void copy_rows(const float *from, int64_t token, int64_t n, int64_t size, int64_t width, float factor,
                      float *out) {
  for (int64_t t = 0; t < n; t++)
    for (int64_t j = 0; j < size; j += LANES)
      store_up_to(out + t * width + j, load_up_to(from + t * token + j, size - j) * factor, size - j);
}

/* rows [n, size] that are `token` apart -> out [size, QUERIES]; columns up to a multiple of COLUMNS are 0 */
static void transpose_rows(const float *from, int64_t token, int64_t n, int64_t size, float *out) {
  for (int64_t first = 0; first < up(n); first += LANES)
    for (int64_t j = 0; j < size; j += LANES)
      transpose(from + first * token + j, token, n - first, least(LANES, size - j), out + j * QUERIES + first, QUERIES,
                LANES);
}

/* Copies of a segment's keys and values, its prefix first; keys are multiplied with the scale of the scores */
static void take_keys(Work *w, const Segment *s, Heads k, Heads v, int64_t head, float scale) {
  const float *keys = k.data + head * k.head, *values = v.data + head * v.head;
  copy_rows(keys + s->prefix * k.token, k.token, s->prefixed, w->size, w->width, scale, w->keys);
  copy_rows(keys + s->query * k.token, k.token, s->queries, w->size, w->width, scale, w->keys + s->prefixed * w->width);
  copy_rows(values + s->prefix * v.token, v.token, s->prefixed, w->value_size, w->value_width, 1, w->values);
  copy_rows(values + s->query * v.token, v.token, s->queries, w->value_size, w->value_width, 1,
            w->values + s->prefixed * w->value_width);
}

/* A block of queries: their number, the place of the first one in its sequence, and how many keys one sees at most */
typedef struct {
  int64_t rows, place, window;
} QueryBlock;

/* the first key that the query in a row of the block sees */
static inline int64_t first_seen(QueryBlock b, int64_t row) {
  int64_t end = b.place + row + 1;
  return end > b.window ? end - b.window : 0;
}

/* A table of scores has numbers for queries of a group, COLUMNS of them from `column` on, and keys first..end: all that
   one of these queries sees */
typedef struct {
  int64_t first, end;
} Keys;

static inline Keys seen_by(QueryBlock b, int64_t column) {
  return (Keys){first_seen(b, column), b.place + least(column + COLUMNS, b.rows)};
}

/* out [keys, QUERIES] = x [keys, width] @ across [size, QUERIES], of each group and what it sees */
static void products(const float *x, int64_t width, int64_t size, const float *across, QueryBlock b, float *out) {
  for (int64_t column = 0; column < b.rows; column += COLUMNS) {
    Keys seen = seen_by(b, column);
    for (int64_t key = seen.first; key < seen.end; key += ROWS)
      tile(x + key * width, width, 1, across + column, QUERIES, size, out + key * QUERIES + column, QUERIES, 0,
           least(ROWS, seen.end - key));
  }
}

/* out [rows, width] = weights [keys, QUERIES]^T @ x [keys, width] */
static void sums(const float *weights, const float *x, int64_t width, QueryBlock b, float *out) {
  for (int64_t column = 0; column < width; column += COLUMNS)
    for (int64_t group = 0; group < b.rows; group += COLUMNS)
      for (int64_t r = group, count; r < least(group + COLUMNS, b.rows); r += count) {
        int64_t first = first_seen(b, r);
        count = least(ROWS, least(group + COLUMNS, b.rows) - r);
        tile(weights + first * QUERIES + r, 1, QUERIES, x + first * width + column, width, b.place + r + count - first,
             out + r * width + column, width, 0, count);
      }
}

/* total [keys, width] += weights [keys, QUERIES] @ x [rows, width]. A tile takes the groups that see one of its keys:
   their weights must be 0 for ROWS - 1 keys before and behind what they see (`clear`) */
static void add_sums(const float *weights, const float *x, int64_t width, QueryBlock b, float *total) {
  int64_t end = b.place + b.rows;
  for (int64_t key = first_seen(b, 0); key < end; key += ROWS) {
    int64_t count = least(ROWS, end - key), from = key > b.place ? (key - b.place) / COLUMNS * COLUMNS : 0;
    int64_t to = least(b.rows, up(least(b.window, end) + key + count - 1 - b.place));
    for (int64_t column = 0; column < width; column += COLUMNS)
      tile(weights + key * QUERIES + from, QUERIES, 1, x + from * width + column, width, to - from,
           total + key * width + column, width, 1, count);
  }
}

/* Zeros before and behind what LANES queries see, as `add_sums` wants them. table: from the column of the first on */
static void clear(float *table, Keys seen, QueryBlock b) {
  int64_t first = first_seen(b, 0), before = seen.first - (ROWS - 1), behind = seen.end + (ROWS - 1);
  for (int64_t key = before > first ? before : first; key < seen.first; key++) store(table + key * QUERIES, all(0));
  for (int64_t key = seen.end; key < least(behind, b.place + b.rows); key++) store(table + key * QUERIES, all(0));
}

/* Which of the LANES queries from `row` on see a key */
static inline ivec visible(QueryBlock b, int64_t row, int64_t key) {
  const ivec lane = {NUMBERS};
  int64_t from = key - b.place - row, to = least(b.window, LANES - from) + from;
  return (lane >= (int32_t)from) & (lane < (int32_t)to);
}

/* Scores that LANES queries from `row` on do not see become -infinity, of which exp is 0. table: from that column on */
static inline void mask(float *table, Keys seen, QueryBlock b, int64_t row) {
  int64_t whole = first_seen(b, row + LANES - 1), last = b.place + row; /* all see whole..last */
  for (int64_t key = seen.first; key < seen.end; key++) {
    if (key >= whole && key <= last) {
      key = last;
      continue;
    }
    float *at = table + key * QUERIES;
    store(at, select(visible(b, row, key), load(at), all(-INFINITY)));
  }
}

/* Scores become exp(score - largest of the query). factors: 1 / sum over keys; normalizers: log(sum of exp(score)) */
static void softmax(float *scores, QueryBlock b, float *factors, float *normalizers) {
  for (int64_t row = 0; row < b.rows; row += LANES) {
    Keys seen = seen_by(b, row / COLUMNS * COLUMNS);
    float *own = scores + row;
    mask(own, seen, b, row);
    vec peak = load(own + seen.first * QUERIES), more = peak, total = all(0);
    int64_t key = seen.first;
    for (; key + 1 < seen.end; key += 2) {
      peak = larger(load(own + key * QUERIES), peak);
      more = larger(load(own + (key + 1) * QUERIES), more);
    }
    peak = larger(load(own + (seen.end - 1) * QUERIES), larger(peak, more)); /* an odd one is left */
    for (key = seen.first; key < seen.end; key++) {
      vec weight = vexp(load(own + key * QUERIES) - peak);
      total += weight;
      store(own + key * QUERIES, weight);
    }
    store(factors + row, 1 / total);
    store(normalizers + row, peak + vlog(total));
  }
}

/* Scores become probabilities w, and slopes, which are the gradients of these, those of the scores:
   w * (slope - sum over keys of w * slope). normalizers: log(sum of exp(score)) */
static void softmax_backward(float *scores, float *slopes, QueryBlock b, const float *normalizers) {
  for (int64_t row = 0; row < b.rows; row += LANES) {
    Keys seen = seen_by(b, row / COLUMNS * COLUMNS);
    float *own = scores + row, *slope = slopes + row;
    vec normalizer = load(normalizers + row), mean = all(0);
    mask(own, seen, b, row);
    for (int64_t key = seen.first; key < seen.end; key++) {
      vec weight = vexp(load(own + key * QUERIES) - normalizer);
      mean += weight * load(slope + key * QUERIES);
      store(own + key * QUERIES, weight);
    }
    for (int64_t key = seen.first; key < seen.end; key++)
      store(slope + key * QUERIES, load(own + key * QUERIES) * (load(slope + key * QUERIES) - mean));
    clear(own, seen, b), clear(slope, seen, b);
  }
}

static void forward_segment(Work *w, const Segment *s, Heads q, int64_t head, int64_t heads, int64_t window, float *out,
                            float *normalizers) {
  for (int64_t done = 0; done < s->queries; done += QUERIES) {
    QueryBlock b = {least(QUERIES, s->queries - done), s->prefixed + done, window};
    int64_t row = s->query + done;
    float factors[QUERIES], logs[QUERIES];
    transpose_rows(q.data + head * q.head + row * q.token, q.token, b.rows, w->size, w->queries_across);
    products(w->keys, w->width, w->size, w->queries_across, b, w->scores);
    softmax(w->scores, b, factors, logs);
    sums(w->scores, w->values, w->value_width, b, w->result);
    for (int64_t r = 0; r < b.rows; r++) {
      int64_t at = (row + r) * heads + head;
      normalizers[at] = logs[r];
      copy_rows(w->result + r * w->value_width, 0, 1, w->value_size, 0, factors[r], out + at * w->value_size);
    }
  }
}

static void backward_segment(Work *w, const Segment *s, Heads q, Heads grad, int64_t head, int64_t heads,
                             int64_t window, const float *normalizers, float *grad_q) {
  for (int64_t done = 0; done < s->queries; done += QUERIES) {
    QueryBlock b = {least(QUERIES, s->queries - done), s->prefixed + done, window};
    int64_t row = s->query + done;
    const float *queries = q.data + head * q.head + row * q.token;
    const float *grads = grad.data + head * grad.head + row * grad.token;
    float logs[QUERIES] = {0};
    for (int64_t r = 0; r < b.rows; r++) logs[r] = normalizers[(row + r) * heads + head];
    copy_rows(queries, q.token, b.rows, w->size, w->width, 1, w->queries);
    copy_rows(grads, grad.token, b.rows, w->value_size, w->value_width, 1, w->grads);
    transpose_rows(queries, q.token, b.rows, w->size, w->queries_across);
    transpose_rows(grads, grad.token, b.rows, w->value_size, w->grads_across);
    products(w->keys, w->width, w->size, w->queries_across, b, w->scores);
    products(w->values, w->value_width, w->value_size, w->grads_across, b, w->slopes);
    softmax_backward(w->scores, w->slopes, b, logs);
    add_sums(w->scores, w->grads, w->value_width, b, w->grad_values);
    add_sums(w->slopes, w->queries, w->width, b, w->grad_keys);
    sums(w->slopes, w->keys, w->width, b, w->result);
    copy_rows(w->result, w->width, b.rows, w->size, heads * w->size, 1, grad_q + (row * heads + head) * w->size);
  }
}

/* Gradients of a segment's keys or values [keys, width], times `factor`, to rows [tokens, kv_heads, size]: its own are
   set, those of its prefix, which its owner has set, are added */
static void give(const Segment *s, const float *x, int64_t width, int64_t size, float factor, int64_t head,
                 int64_t kv_heads, float *to) {
  for (int64_t t = 0; t < s->prefixed; t++)
    add_to(x + t * width, size, factor, to + ((s->prefix + t) * kv_heads + head) * size);
  copy_rows(x + s->prefixed * width, width, s->queries, size, kv_heads * size, factor,
            to + (s->query * kv_heads + head) * size);
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
        take_keys(&w, segments + i, (Heads){k, k_head, k_token}, (Heads){v, v_head, v_token}, h, scale);
        for (int64_t g = h * queries; g < (h + 1) * queries; g++)
          forward_segment(&w, segments + i, (Heads){q, q_head, q_token}, g, heads, window, out, normalizers);
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
                       const float *normalizers, float *grad_q, float *grad_k, float *grad_v) {
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
          take_keys(&w, s, (Heads){k, k_head, k_token}, (Heads){v, v_head, v_token}, h, scale);
          memset(w.grad_keys, 0, n * w.width * sizeof(float));
          memset(w.grad_values, 0, n * w.value_width * sizeof(float));
          for (int64_t g = h * queries; g < (h + 1) * queries; g++)
            backward_segment(&w, s, (Heads){q, q_head, q_token}, (Heads){grad, grad_head, grad_token}, g, heads,
                             window, normalizers, grad_q);
          give(s, w.grad_keys, w.width, size, scale, h, kv_heads, grad_k);
          give(s, w.grad_values, w.value_width, value_size, 1, h, kv_heads, grad_v);
        }
    free(w.memory);
  }
  return failed;
}
