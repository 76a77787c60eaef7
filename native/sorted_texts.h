// Texts with a sorted index, which finds the longest match of a text's end in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace ggufspec {

// The index is a list of places, sorted by the tokens that end there, read backwards: places that match are adjacent. It
// takes 8 bytes per token. Not for two threads at once.
class SortedTexts {
public:
    static constexpr int32_t kEnd = std::numeric_limits<int32_t>::min();  // a mark before each text
    static constexpr size_t kMostMatch = 32;  // tokens compared; a longer match is no better evidence [judgement]
    static constexpr size_t kMostRead = 2048;  // equally long matches read to find the latest ones [limit on time]

    // The range of the longest matches in the index, and their length; 0: there are none.
    struct Matches {
        size_t length = 0, begin = 0, end = 0;
    };

    // Adds a text. At most INT32_MAX tokens in total.
    void add(const int32_t * tokens, size_t n);

    // Makes these tokens the only text: keeps the common prefix, and returns its length.
    size_t update(const int32_t * tokens, size_t n);

    // Removes whole texts, the oldest first, until at most n_most tokens are left.
    void drop(size_t n_most);

    // The longest matches of the tokens that end with *last. A kEnd or kMostMatch tokens must be readable before it.
    Matches find(const int32_t * last) const;

    // The ends of the latest n_most of these matches, the latest first.
    std::vector<int32_t> latest(const Matches & matches, size_t n_most) const;

    const std::vector<int32_t> & tokens() const { return tokens_; }  // a kEnd before each text
    uint64_t n_dropped() const { return n_dropped_; }                // tokens removed before these
    size_t n_compared() const { return n_compared_; }                // places compared: the cost, independent of a clock

private:
    size_t n_common(const int32_t * a, const int32_t * b) const;
    bool precedes(const int32_t * a, const int32_t * b) const;
    void sort();

    std::vector<int32_t> tokens_, order_;
    size_t n_sorted_ = 0;  // tokens in the index; a last token without successor is not in it
    uint64_t n_dropped_ = 0;
    mutable size_t n_compared_ = 0;
};

}  // namespace ggufspec
