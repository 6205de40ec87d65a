/* What a decode step does with the tokens that it has sampled (`sampled_tokens.py`). */

#include <stdint.h>

/* Give `count` slots from `first` on their tokens, and append them to the responses of their sequences where these are
   active: `responses` and their log-probs are [sequences, width], whose last column takes what is dropped. A sequence
   that is active no more gets its length, and whether it has ended, in `lengths` and `have_ended`. ends [num_ends]:
   tokens that end a sequence. Returns how many are active no more */
int64_t append_sampled(const int64_t *tokens, const float *logprobs, int64_t first, int64_t count, const int64_t *seq_id,
                       int64_t *num_generated, int64_t *token, float *logprob, uint8_t *active, uint8_t *finished,
                       const int64_t *ends, int64_t num_ends, int64_t width, int64_t *responses,
                       float *response_logprobs, int64_t *lengths, uint8_t *have_ended) {
  int64_t stopped = 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t slot = first + i;
    int was_active = active[slot], ended = 0;
    int64_t at = seq_id[slot] * width + (was_active ? num_generated[slot] : width - 1);
    responses[at] = token[slot] = tokens[i];
    response_logprobs[at] = logprob[slot] = logprobs[i];
    for (int64_t e = 0; e < num_ends; e++) ended |= tokens[i] == ends[e];
    num_generated[slot] += was_active;
    finished[slot] |= was_active & ended;
    active[slot] = was_active & !ended & (num_generated[slot] < width - 1);
    if (was_active && !active[slot]) {
      stopped++;
      lengths[seq_id[slot]] = num_generated[slot];
      have_ended[seq_id[slot]] = finished[slot];
    }
  }
  return stopped;
}
