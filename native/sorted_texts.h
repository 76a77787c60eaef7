// Texts, sorted so that the longest match of a text's end is found anywhere in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace ggufspec {

// Places of tokens, sorted by the tokens that end there, read backwards: matches lie side by side. Takes 8 bytes a token.
// Not for two threads at once.
class SortedTexts {
public:
    static constexpr int32_t kEnd = std::numeric_limits<int32_t>::min();  // stands before each text
    static constexpr size_t kMostMatch = 32;  // tokens compared; a longer match says no more [judgement]
    static constexpr size_t kMostRead = 2048;  // of equally long matches, of which the latest are found [limit on time]

    // Where the longest matches are in the order, and how long they are; 0: there are none.
    struct Matches {
        size_t length = 0, begin = 0, end = 0;
    };

    // Another text. At most INT32_MAX tokens in all.
    void add(const int32_t * tokens, size_t n);

    // Makes these tokens the only text: removes what differs, appends the rest. Returns the length of the common prefix.
    size_t update(const int32_t * tokens, size_t n);

    // Removes whole texts, the oldest first, until there are n_most tokens at most.
    void drop(size_t n_most);

    // Of the tokens up to and with *last, before which a kEnd or kMostMatch tokens stand.
    Matches find(const int32_t * last) const;

    // Where the latest n_most of these matches end, the latest first.
    std::vector<int32_t> latest(const Matches & matches, size_t n_most) const;

    const std::vector<int32_t> & tokens() const { return tokens_; }  // each text behind a kEnd
    uint64_t n_dropped() const { return n_dropped_; }                // before those
    size_t n_compared() const { return n_compared_; }                // places so far: the cost, independent of a clock

private:
    size_t n_common(const int32_t * a, const int32_t * b) const;
    bool precedes(const int32_t * a, const int32_t * b) const;
    void sort();

    std::vector<int32_t> tokens_, order_;
    size_t n_sorted_ = 0;  // tokens that the order has, unless nothing follows them
    uint64_t n_dropped_ = 0;
    mutable size_t n_compared_ = 0;
};

}  // namespace ggufspec
