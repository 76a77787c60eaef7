#include "ngrams.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace ggufspec {

namespace {

constexpr uint64_t kBase = 0x9E3779B97F4A7C15;  // hashes are polynomials of the tokens at this, modulo 2^64
constexpr uint64_t kMix = 0xD6E8FEB86659FD93;   // spreads a hash over its upper bits, which are the slot
constexpr int kSlotBitsFirst = 15;

// What a source counts beside the next more recent one. Nearer to 0 the most recent alone decides, at 1 the
// majority: on code and on prose, this guesses better than either.
constexpr double kOlder = 0.85;

void count(uint16_t & n) {
    if (n < std::numeric_limits<uint16_t>::max()) n++;
}

}  // namespace

Ngrams::Ngrams() : hashes_{0}, n_slot_bits_(kSlotBitsFirst) {
    for (auto & last : last_) last.assign(size_t{1} << n_slot_bits_, -1);
    powers_.fill(1);
    for (size_t i = 0; i < kSpansN; i++) {
        for (size_t k = 0; k < kSpans[i]; k++) powers_[i] *= kBase;
    }
}

size_t Ngrams::update(const int32_t * tokens, size_t n) {
    size_t n_common = std::min(n, text_.size());
    // As a rule nothing differs, and that is told several times as fast as where it does.
    if (n_common > 0 && std::memcmp(tokens, text_.data(), n_common * sizeof *tokens) != 0) {
        n_common = std::mismatch(tokens, tokens + n_common, text_.begin()).first - tokens;
    }
    forget_from(n_common);
    make_room(n);
    for (size_t i = n_common; i < n; i++) add(tokens[i]);
    return n_common;
}

Guess Ngrams::guess(size_t n_most) {
    voters_.clear();
    n_voters_.clear();
    Guess guess;
    const size_t n_text = text_.size();
    size_t length = find_sources();
    if (length == 0) return guess;
    // Guessed tokens stand in the text meanwhile: a source that comes to its end reads on in them.
    for (size_t i = 0; i < std::min(n_most, kMostGuessed); i++) {
        guess.shares.push_back(vote());
        guess.lengths.push_back(static_cast<int32_t>(length));
        length = std::min(length + 1, kMostMatch);
    }
    guess.tokens.assign(text_.begin() + n_text, text_.end());
    text_.resize(n_text);
    return guess;
}

void Ngrams::observe(size_t n_accepted, size_t n_guessed) {
    size_t voter = 0;
    for (size_t i = 0; i < n_guessed && i <= n_accepted; i++) {
        for (; voter < n_voters_[i]; voter++) {
            const auto [place, agrees] = voters_[voter];
            if (static_cast<size_t>(place) >= places_.size()) continue;  // itself a guess, or forgotten since
            if (i < n_accepted) count(agrees ? places_[place].n_right : places_[place].n_wrong);
            else if (agrees) count(places_[place].n_wrong);  // of the others nobody knows
        }
    }
    voters_.clear();
    n_voters_.clear();
}

void Ngrams::forget_from(size_t n) {
    // The newest first: so each slot gets back what it held before.
    for (size_t place = places_.size(); place-- > n;) {
        for (size_t i = 0; i < kSpansN && kSpans[i] <= place + 1; i++) last_[i][slot(place, i)] = places_[place].before[i];
    }
    text_.resize(n);
    places_.resize(n);
    hashes_.resize(n + 1);
}

// Twice as many slots as tokens, so that runs seldom share one.
void Ngrams::make_room(size_t n) {
    if (2 * n <= last_[0].size()) return;
    while (2 * n > size_t{1} << n_slot_bits_) n_slot_bits_++;
    for (auto & last : last_) last.assign(size_t{1} << n_slot_bits_, -1);
    for (size_t place = 0; place < places_.size(); place++) link(place);
}

void Ngrams::add(int32_t token) {
    text_.push_back(token);
    hashes_.push_back(hashes_.back() * kBase + static_cast<uint32_t>(token) + 1);
    places_.emplace_back();
    link(places_.size() - 1);
}

void Ngrams::link(size_t place) {
    places_[place].before.fill(-1);
    for (size_t i = 0; i < kSpansN && kSpans[i] <= place + 1; i++) {
        int32_t & last = last_[i][slot(place, i)];
        places_[place].before[i] = last;
        last = static_cast<int32_t>(place);
    }
}

// Of the run of kSpans[span] tokens that ends at `place`.
size_t Ngrams::slot(size_t place, size_t span) const {
    const uint64_t hash = hashes_[place + 1] - hashes_[place + 1 - kSpans[span]] * powers_[span];
    return ((hash ^ hash >> 32) * kMix) >> (64 - n_slot_bits_);
}

// How many tokens up to `place` are those up to the end of the text.
size_t Ngrams::match_length(size_t place) const {
    const size_t end = text_.size() - 1;
    const size_t n_most = std::min(kMostMatch, place + 1);
    size_t n = 0;
    while (n < n_most && text_[place - n] == text_[end - n]) n++;
    return n;
}

// The longest matches of the text's end, by the longest span that finds any. Returns their length.
size_t Ngrams::find_sources() {
    sources_.clear();
    size_t longest = 0;
    for (size_t i = kSpansN; i-- > 0 && !text_.empty() && longest == 0;) {
        int32_t place = places_.back().before[i];
        for (size_t n = 0; n < kMostSources && place >= 0; n++, place = places_[place].before[i]) {
            n_examined_++;
            const size_t length = match_length(place);
            if (length < std::max(kSpans[i], longest)) continue;  // shorter, or another run in the same slot
            if (length > longest) sources_.clear();
            longest = length;
            sources_.push_back({place + 1, sources_.empty() ? 1.0 : sources_.back().weight * kOlder});
        }
    }
    return longest;
}

// That a source is right, as far as it was ever tried.
double Ngrams::belief(int32_t place) const {
    if (static_cast<size_t>(place) >= places_.size()) return 0.5;
    const Place & at = places_[place];
    return (at.n_right + 1.0) / (at.n_right + at.n_wrong + 2.0);
}

// Writes the token that the sources vote for behind the text, and keeps those that agree. Returns its share.
double Ngrams::vote() {
    struct Choice {
        int32_t token;
        double votes;
    };
    std::array<Choice, kMostSources> choices{};
    size_t n_choices = 0;
    double all = 0;
    for (const Source & source : sources_) {
        const int32_t token = text_[source.place];
        const double believed = belief(source.place);
        size_t i = 0;
        while (i < n_choices && choices[i].token != token) i++;
        if (i == n_choices) choices[n_choices++] = {token, 0};
        choices[i].votes += source.weight * believed;
        all += source.weight * std::max(believed, 1 - believed);  // one that was mostly wrong speaks against itself
    }
    // Of equals the first, which is the most recent.
    const Choice best = *std::max_element(choices.begin(), choices.begin() + n_choices,
                                          [](const Choice & a, const Choice & b) { return a.votes < b.votes; });
    size_t n_kept = 0;
    for (const Source source : sources_) {
        const bool agrees = text_[source.place] == best.token;
        voters_.push_back({source.place, agrees});
        if (agrees) sources_[n_kept++] = {source.place + 1, source.weight};
    }
    sources_.resize(n_kept);
    n_voters_.push_back(voters_.size());
    text_.push_back(best.token);
    return best.votes / all;
}

}  // namespace ggufspec
