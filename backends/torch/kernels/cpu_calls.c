/* Runs of calls of the kernels, for `kernel_library.py`: a call is SLOTS numbers, of which the first is the kernel's
   place in IN_RUNS and the others are its arguments, pointers and the bits of floats among them. */

#define SLOTS 24

static inline float number(int64_t bits) {
  int32_t low = (int32_t)bits;
  float x;
  memcpy(&x, &low, sizeof x);
  return x;
}

static int run_call(const int64_t *call) {
  const int64_t *n = call + 1;
#define AT(I) ((void *)(intptr_t)n[I])
  switch (call[0]) {
    case 0: rms_norm(AT(0), AT(1), n[2], n[3], number(n[4]), AT(5), AT(6)); return 0;
    case 1: rotary(AT(0), n[1], n[2], AT(3), AT(4), n[5], n[6], n[7], (int)n[8], AT(9)); return 0;
    case 2: gated_product(AT(0), AT(1), n[2], AT(3)); return 0;
    case 3: add(AT(0), AT(1), n[2], AT(3)); return 0;
    case 4:
      return decode_attention(AT(0), n[1], n[2], AT(3), n[4], n[5], AT(6), n[7], n[8], AT(9), AT(10), n[11], AT(12),
                              n[13], n[14], n[15], n[16], n[17], number(n[18]), n[19], AT(20));
    case 5: return few_row_product(AT(0), n[1], AT(2), AT(3), n[4], n[5], n[6], AT(7));
    case 6: return few_row_sample(AT(0), n[1], AT(2), AT(3), n[4], n[5], n[6], number(n[7]), AT(8), AT(9));
    case 7: rotary_angles(AT(0), AT(1), n[2], n[3], number(n[4]), AT(5), AT(6)); return 0;
    case 8: add_integers(AT(0), AT(1), n[2], AT(3)); return 0;
    case 9: return select_rows(AT(0), n[1], n[2], AT(3), n[4], AT(5));
    case 10: return select_columns(AT(0), n[1], AT(2), n[3], AT(4));
    default: return 1;
  }
#undef AT
}

/* calls: [count, SLOTS]. Returns what the first one that fails returns, else 0 */
int run_calls(const int64_t *calls, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    int failed = run_call(calls + i * SLOTS);
    if (failed) return failed;
  }
  return 0;
}
