#include "verify.h"

#include <algorithm>
#include <vector>

namespace ggufspec {
namespace {

constexpr double kMostWeight = 2;  // limit of importance weights, for the draft temperature [judgement]

double drafted(const Judged & judged, size_t i) { return judged.draft ? judged.draft[i].of(judged.tokens[i]) : 1.0; }

// A draw from max(factor * target - draft, 0) at position i.
int32_t replacement(const Judged & judged, size_t i, double factor, double uniform) {
    if (judged.draft) return judged.target[i].pick_excess(static_cast<float>(factor), judged.draft[i], uniform);
    return judged.target[i].pick_excess(static_cast<float>(factor), Row::certain(judged.tokens[i]), uniform);
}

}  // namespace

Verdict match(const Judged & judged) {
    for (size_t i = 0;; i++) {
        const int32_t drawn = judged.target[i].pick(judged.uniforms[i]);
        if (i == judged.n_draft || drawn != judged.tokens[i]) return {static_cast<int32_t>(i), drawn};
    }
}

Verdict rejection(const Judged & judged) {
    const double last_uniform = judged.uniforms[judged.n_draft];
    for (size_t i = 0; i < judged.n_draft; i++) {
        if (judged.uniforms[i] * drafted(judged, i) >= judged.target[i].of(judged.tokens[i])) {
            return {static_cast<int32_t>(i), replacement(judged, i, 1.0, last_uniform)};
        }
    }
    return {static_cast<int32_t>(judged.n_draft), judged.target[judged.n_draft].pick(last_uniform)};
}

Verdict block(const Judged & judged) {
    const size_t n = judged.n_draft;
    const double last_uniform = judged.uniforms[n];
    // ratios[i]: how much of the first i tokens' probability under the draft the target covers, at most all.
    thread_local std::vector<double> ratios;
    ratios.assign(1, 1.0);
    for (size_t i = 0; i < n; i++) {
        const double draft = drafted(judged, i);
        const double covered = ratios[i] * judged.target[i].of(judged.tokens[i]);
        ratios.push_back(covered < draft ? covered / draft : 1.0);
    }
    // The longest prefix that passes is accepted, so start with the longest; most rounds never read a whole distribution.
    if (n > 0 && judged.uniforms[n - 1] < ratios[n]) return {static_cast<int32_t>(n), judged.target[n].pick(last_uniform)};
    for (size_t i = n; i-- > 0;) {
        if (i > 0) {
            // The excess of a factor at most 1 over the draft: the target's whole minus what they share.
            const double shared = judged.draft ? judged.target[i].overlap(static_cast<float>(ratios[i]), judged.draft[i])
                                               : ratios[i] * judged.target[i].of(judged.tokens[i]);
            const double excess = std::max(ratios[i] - shared, 0.0);
            const double rest = excess + 1 - ratios[i];
            if (rest > 0 && judged.uniforms[i - 1] * rest >= excess) continue;
        }
        return {static_cast<int32_t>(i), replacement(judged, i, ratios[i], last_uniform)};
    }
    return {0, judged.target[0].pick(last_uniform)};  // nothing was drafted
}

double expected_length(const Judged & judged, float temperature) {
    double length = 0, weight = 1, ratio = 1;
    for (size_t i = 0; i < judged.n_draft && weight > 0; i++) {
        const Row other = judged.draft[i].at(temperature);
        length += weight * judged.target[i].overlap(static_cast<float>(ratio), other);
        const double drawn = drafted(judged, i), would = other.of(judged.tokens[i]);
        weight = std::min(weight * (drawn > 0 ? would / drawn : 0), kMostWeight);
        const double covered = ratio * judged.target[i].of(judged.tokens[i]);
        ratio = covered < would ? covered / would : 1;
    }
    return length;
}

}  // namespace ggufspec
