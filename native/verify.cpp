#include "verify.h"

#include <vector>

#include "sampling.h"

namespace ggufspec {
namespace {

// A draw from max(target - draft, 0). Where rounding leaves nothing of it, target and draft are equal there,
// and a draw from the target is the same draw.
int32_t pick_residual(const float * target, const float * draft, int32_t certain, size_t n_vocab, double coin) {
    thread_local std::vector<float> residual;
    residual.resize(n_vocab);
    bool any = false;
    for (size_t i = 0; i < n_vocab; i++) {
        const float drafted = draft ? draft[i] : (static_cast<int32_t>(i) == certain ? 1.0f : 0.0f);
        residual[i] = target[i] > drafted ? target[i] - drafted : 0.0f;
        any = any || residual[i] > 0;
    }
    return pick(any ? residual.data() : target, n_vocab, coin);
}

}  // namespace

Verdict match(const Judged & judged) {
    for (size_t i = 0;; i++) {
        const int32_t drawn = pick(judged.target_probs + i * judged.n_vocab, judged.n_vocab, judged.coins[i]);
        if (i == judged.n_draft || drawn != judged.tokens[i]) return {static_cast<int32_t>(i), drawn};
    }
}

Verdict rejection(const Judged & judged) {
    const double last_coin = judged.coins[judged.n_draft];
    for (size_t i = 0; i < judged.n_draft; i++) {
        const float * target = judged.target_probs + i * judged.n_vocab;
        const float * draft = judged.draft_probs ? judged.draft_probs + i * judged.n_vocab : nullptr;
        const int32_t token = judged.tokens[i];
        const double drafted = draft ? draft[token] : 1.0;
        if (judged.coins[i] * drafted >= target[token]) {
            return {static_cast<int32_t>(i), pick_residual(target, draft, token, judged.n_vocab, last_coin)};
        }
    }
    const float * target = judged.target_probs + judged.n_draft * judged.n_vocab;
    return {static_cast<int32_t>(judged.n_draft), pick(target, judged.n_vocab, last_coin)};
}

}  // namespace ggufspec
