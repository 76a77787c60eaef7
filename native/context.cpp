#include "context.h"

#include <algorithm>
#include <chrono>
#include <numeric>

namespace ggufspec {

Context::Context(Functions functions, void * context, void * memory, size_t n_batch)
    : functions_(functions),
      context_(context),
      memory_(memory),
      tokens_(n_batch),
      positions_(n_batch),
      n_sequences_(n_batch, 1),
      sequences_(n_batch, &sequence_),
      wanted_(n_batch) {}

int32_t Context::decode(const int32_t * tokens, size_t n_tokens, int32_t first, size_t n_rows) {
    std::copy(tokens, tokens + n_tokens, tokens_.begin());
    std::iota(positions_.begin(), positions_.begin() + n_tokens, first);
    std::fill(wanted_.begin(), wanted_.begin() + (n_tokens - n_rows), 0);
    std::fill(wanted_.begin() + (n_tokens - n_rows), wanted_.begin() + n_tokens, 1);
    const Batch batch{static_cast<int32_t>(n_tokens), tokens_.data(),    nullptr,       positions_.data(),
                      n_sequences_.data(),            sequences_.data(), wanted_.data()};
    const auto start = std::chrono::steady_clock::now();
    const int32_t result = functions_.decode(context_, batch);
    functions_.synchronize(context_);
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return result;
}

const float * Context::logits(int32_t i) const { return functions_.get_logits_ith(context_, i); }

bool Context::truncate(int32_t first) const { return functions_.seq_rm(memory_, sequence_, first, -1); }

}  // namespace ggufspec
