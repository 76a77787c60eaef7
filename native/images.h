// The cells of images in a text. A cell has a negative "token" that is made from a hash of the image, so a text with images is
// compared, kept and counted as one without; only its decoding differs.
//
// The last cell of an image has bit 30, and in its lowest bits the number of positions that the image takes; 0: one per cell.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace ggufspec::images {

constexpr int32_t kEnds = 1 << 30, kPositions = (1 << 12) - 1;

inline bool is_inside(int32_t token) { return token < 0 && (token & kEnds) == 0; }

// The length of a prefix of at most n tokens that does not end inside an image.
inline size_t whole(const int32_t * tokens, size_t n) {
    while (n > 0 && is_inside(tokens[n - 1])) n--;
    return n;
}

// How many positions fewer than cells the images among n tokens take.
inline int32_t n_saved(const int32_t * tokens, size_t n) {
    int32_t n_cells = 0, saved = 0;
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] >= 0) continue;
        n_cells++;
        if (is_inside(tokens[i])) continue;
        const int32_t n_positions = tokens[i] & kPositions;
        if (n_positions > 0) saved += n_cells - n_positions;
        n_cells = 0;
    }
    return saved;
}

}  // namespace ggufspec::images
