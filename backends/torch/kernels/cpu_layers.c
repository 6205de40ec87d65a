/* The gradients of linear layers that read the same rows, for `linear_layers.py`. */

#define LAYER 4

#define POINTER(TYPE, BITS) ((TYPE *)(intptr_t)(BITS))

/* x: [rows, size], rows `x_row` apart. A layer is LAYER numbers, pointers among them: its columns, its weight [columns,
   size], the gradient [rows, columns] of its result, and the total [columns, size] to which that of the weight is added,
   or NULL. grad_x: [rows, size], the sum of what all layers give, or NULL. Returns 1 without memory, else 0 */
int linear_layers_backward(const float *x, int64_t x_row, int64_t rows, int64_t size, const int64_t *layers,
                           int64_t count, float *grad_x) {
  int failed = 0;
  for (const int64_t *n = layers; n < layers + count * LAYER && !failed; n += LAYER) {
    const float *weight = POINTER(const float, n[1]), *grad = POINTER(const float, n[2]);
    float *total = POINTER(float, n[3]);
    if (grad_x) failed |= panel_products(grad, n[0], 1, weight, size, 1, NULL, rows, size, n[0], n > layers, grad_x);
    if (total) failed |= panel_products(grad, 1, n[0], x, x_row, 1, NULL, n[0], size, rows, 1, total);
  }
  return failed;
}
