#include "sorted_texts.h"

#include <algorithm>
#include <cstring>
#include <functional>

namespace ggufspec {

void SortedTexts::add(const int32_t * tokens, size_t n) {
    tokens_.push_back(kEnd);
    tokens_.insert(tokens_.end(), tokens, tokens + n);
    sort();
}

size_t SortedTexts::update(const int32_t * tokens, size_t n) {
    if (tokens_.empty()) tokens_.push_back(kEnd);
    const size_t n_before = tokens_.size() - 1;
    size_t n_same = std::min(n, n_before);
    // Usually nothing differs, and memcmp is several times as fast as mismatch.
    if (n_same > 0 && std::memcmp(tokens, &tokens_[1], n_same * sizeof *tokens) != 0) {
        n_same = std::mismatch(tokens, tokens + n_same, tokens_.begin() + 1).first - tokens;
    }
    if (n_same < n_sorted_) {
        n_sorted_ = n_same;
        const auto is_cut = [this](int32_t place) { return static_cast<size_t>(place) >= n_sorted_; };
        order_.erase(std::remove_if(order_.begin(), order_.end(), is_cut), order_.end());
    }
    tokens_.resize(n_same + 1);
    tokens_.insert(tokens_.end(), tokens + n_same, tokens + n);
    sort();
    return n_same;
}

void SortedTexts::drop(size_t n_most) {
    if (tokens_.size() <= n_most) return;
    const auto begin = std::find(tokens_.end() - n_most, tokens_.end(), kEnd);
    const auto n = static_cast<int32_t>(begin - tokens_.begin());
    tokens_.erase(tokens_.begin(), begin);
    order_.erase(std::remove_if(order_.begin(), order_.end(), [n](int32_t place) { return place < n; }), order_.end());
    for (int32_t & place : order_) place -= n;
    n_sorted_ = tokens_.empty() ? 0 : n_sorted_ - n;
    n_dropped_ += n;
}

SortedTexts::Matches SortedTexts::find(const int32_t * last) const {
    const int32_t * tokens = tokens_.data();
    const auto length = [&](int32_t place) { return n_common(tokens + place, last); };
    const auto at =
        std::partition_point(order_.begin(), order_.end(), [&](int32_t place) { return precedes(tokens + place, last); });
    Matches found;
    if (at != order_.begin()) found.length = length(*(at - 1));
    if (at != order_.end()) found.length = std::max(found.length, length(*at));
    if (found.length == 0) return found;
    const auto is_match = [&](int32_t place) { return length(place) >= found.length; };
    found.begin = std::partition_point(order_.begin(), at, std::not_fn(is_match)) - order_.begin();
    found.end = std::partition_point(at, order_.end(), is_match) - order_.begin();
    return found;
}

std::vector<int32_t> SortedTexts::latest(const Matches & matches, size_t n_most) const {
    const auto begin = order_.begin() + matches.begin;
    const size_t n = std::min(matches.end - matches.begin, kMostRead);
    std::vector<int32_t> places(std::min(n, n_most));
    std::partial_sort_copy(begin, begin + n, places.begin(), places.end(), std::greater<>());
    return places;
}

// Length of the common suffix of the tokens that end at a and at b.
size_t SortedTexts::n_common(const int32_t * a, const int32_t * b) const {
    n_compared_++;
    size_t n = 0;
    for (; n < kMostMatch && *a == *b && *a != kEnd; n++) a--, b--;
    return n;
}

bool SortedTexts::precedes(const int32_t * a, const int32_t * b) const {
    const size_t n = n_common(a, b);
    return n < kMostMatch && a[-std::ptrdiff_t(n)] < b[-std::ptrdiff_t(n)];
}

// Adds the new places to the index, except one without a following token.
void SortedTexts::sort() {
    const size_t n = order_.size();
    for (; n_sorted_ + 1 < tokens_.size(); n_sorted_++) {
        if (tokens_[n_sorted_] != kEnd && tokens_[n_sorted_ + 1] != kEnd) order_.push_back(static_cast<int32_t>(n_sorted_));
    }
    const auto precedes_at = [this](int32_t a, int32_t b) { return precedes(&tokens_[a], &tokens_[b]); };
    const auto added = order_.begin() + n;
    std::sort(added, order_.end(), precedes_at);
    if (n == 0) return;
    // Merges from the last place on: everything between two added places is moved at once, without comparing it.
    std::vector<int32_t> places(added, order_.end());
    auto left = added, to = order_.end();
    for (auto place = places.rbegin(); place != places.rend(); place++) {
        const auto at = std::upper_bound(order_.begin(), left, *place, precedes_at);
        to = std::move_backward(at, left, to);
        left = at;
        *--to = *place;
    }
}

}  // namespace ggufspec
