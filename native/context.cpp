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

size_t Context::n_common(const int32_t * tokens, size_t n_most) const {
    const size_t n = std::min(n_most, cells_.size());
    return std::mismatch(tokens, tokens + n, cells_.begin()).first - tokens;
}

int32_t Context::resume(const int32_t * tokens, size_t n_most) {
    const size_t n = n_common(tokens, n_most);
    if (clean_ && n == cells_.size()) return static_cast<int32_t>(n);
    return truncate(n) ? static_cast<int32_t>(n) : -1;
}

void Context::forget(size_t n_tokens) {
    cells_.resize(std::min(n_tokens, cells_.size()));
    clean_ = false;
}

bool Context::truncate(size_t n_tokens) {
    forget(n_tokens);
    clean_ = functions_.seq_rm(memory_, sequence_, static_cast<int32_t>(n_tokens), -1);
    return clean_;
}

int32_t Context::decode(const int32_t * tokens, size_t n_tokens, size_t n_rows) {
    std::copy(tokens, tokens + n_tokens, tokens_.begin());
    std::iota(positions_.begin(), positions_.begin() + n_tokens, static_cast<int32_t>(cells_.size()));
    std::fill(wanted_.begin(), wanted_.begin() + (n_tokens - n_rows), 0);
    std::fill(wanted_.begin() + (n_tokens - n_rows), wanted_.begin() + n_tokens, 1);
    const Batch batch{static_cast<int32_t>(n_tokens), tokens_.data(),    nullptr,       positions_.data(),
                      n_sequences_.data(),            sequences_.data(), wanted_.data()};
    clean_ = false;
    const auto start = std::chrono::steady_clock::now();
    const int32_t result = functions_.decode(context_, batch);
    functions_.synchronize(context_);
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (result == 0) {
        cells_.insert(cells_.end(), tokens, tokens + n_tokens);
        clean_ = true;
    }
    return result;
}

const float * Context::logits(int32_t i) const { return functions_.get_logits_ith(context_, i); }

}  // namespace ggufspec
