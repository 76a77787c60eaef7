#include "context.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace ggufspec {

namespace {

constexpr std::chrono::milliseconds kCheckInterval{100};
constexpr size_t kNodesPerClock = 8;  // reading the clock at each node took 3 % of a pass of a 1.5 M draft

}  // namespace

Context::Context(Functions functions, void * context, void * memory, size_t n_batch, size_t n_sequences, size_t n_hidden,
                 size_t n_rollback, bool shares_cells)
    : functions_(functions),
      context_(context),
      memory_(memory),
      n_rollback_(n_rollback),
      shares_cells_(shares_cells),
      held_(n_sequences),
      tokens_(n_batch),
      positions_(n_batch),
      n_sequences_(n_batch, 1),
      sequences_(n_batch),
      wanted_(n_batch),
      n_hidden_(n_hidden),
      hidden_(n_batch * n_hidden) {
    for (size_t s = 0; s < n_sequences; s++) held_[s].id = static_cast<int32_t>(s);
    functions_.set_abort_callback(context_, &Context::aborts, this);
}

bool Context::aborts(void * self) {
    Context & context = *static_cast<Context *>(self);
    if (!context.is_interrupted_ || ++context.n_nodes_ % kNodesPerClock != 0) return false;
    if (Clock::now() < context.next_check_) return false;
    const bool stops = context.is_interrupted_();
    context.next_check_ = Clock::now() + kCheckInterval;
    return stops;
}

size_t Context::n_common(size_t sequence, const int32_t * tokens, size_t n_most) const {
    const std::vector<int32_t> & cells = held_[sequence].cells;
    const size_t n = std::min(n_most, cells.size());
    return std::mismatch(tokens, tokens + n, cells.begin()).first - tokens;
}

int32_t Context::resume(size_t sequence, const int32_t * tokens, size_t n_most) {
    const size_t n = n_common(sequence, tokens, n_most);
    const Held & held = held_[sequence];
    if (held.is_clean && n == held.cells.size()) return static_cast<int32_t>(n);
    return truncate(sequence, n) ? static_cast<int32_t>(n) : -1;
}

void Context::begin_restore(size_t sequence, size_t n_tokens) {
    Held & held = held_[sequence];
    held.cells.resize(std::min(n_tokens, held.cells.size()));
    held.is_clean = false;
    held.n_droppable = -1;
}

bool Context::truncate(size_t sequence, size_t n_tokens) {
    Held & held = held_[sequence];
    const int32_t n_kept = static_cast<int32_t>(std::min(n_tokens, held.cells.size()));
    const int32_t n_dropped = static_cast<int32_t>(held.cells.size()) - n_kept;
    // llama.cpp would also roll back to states that the last batch has not written.
    const bool is_kept = n_rollback_ == 0 || n_kept == 0 || n_dropped <= held.n_droppable;
    held.cells.resize(n_kept);
    held.is_clean = is_kept && functions_.seq_rm(memory_, held.id, n_kept, -1);
    if (!held.is_clean) {
        held.n_droppable = -1;
    } else if (n_kept == 0 || n_dropped > 0) {
        held.n_droppable = 0;  // until the next batch
    }
    return held.is_clean;
}

void Context::copy_prefix(size_t source, size_t sequence, size_t n_tokens) {
    truncate(sequence, 0);
    const Held & from = held_[source];
    Held & to = held_[sequence];
    const size_t n = std::min(n_tokens, from.cells.size());
    functions_.seq_cp(memory_, from.id, to.id, 0, static_cast<int32_t>(n));
    to.cells.assign(from.cells.begin(), from.cells.begin() + n);
}

void Context::begin() {
    parts_.clear();
    n_added_ = 0;
}

void Context::add(size_t sequence, const int32_t * tokens, size_t n_tokens, size_t n_rows, const float * hidden) {
    Held & held = held_[sequence];
    const size_t first = n_added_, end = n_added_ + n_tokens;
    std::copy(tokens, tokens + n_tokens, tokens_.begin() + first);
    const auto hidden_first = hidden_.begin() + first * n_hidden_;
    if (hidden) std::copy(hidden, hidden + n_tokens * n_hidden_, hidden_first);
    else std::fill(hidden_first, hidden_first + n_tokens * n_hidden_, 0.0f);
    const int32_t position = shares_cells_ ? functions_.seq_pos_max(memory_, held.id) + 1 : static_cast<int32_t>(held.cells.size());
    std::iota(positions_.begin() + first, positions_.begin() + end, position);
    std::fill(sequences_.begin() + first, sequences_.begin() + end, &held.id);
    std::fill(wanted_.begin() + first, wanted_.begin() + (end - n_rows), 0);
    std::fill(wanted_.begin() + (end - n_rows), wanted_.begin() + end, 1);
    parts_.push_back({&held, n_tokens});
    n_added_ = end;
}

int32_t Context::run(std::function<bool()> is_interrupted) {
    const Batch batch{static_cast<int32_t>(n_added_), tokens_.data(),    n_hidden_ ? hidden_.data() : nullptr, positions_.data(),
                      n_sequences_.data(),            sequences_.data(), wanted_.data()};
    for (const Part & part : parts_) {
        part.held->is_clean = false;
        part.held->n_droppable = -1;
    }
    const auto start = Clock::now();
    next_check_ = start + kCheckInterval;
    is_interrupted_ = std::move(is_interrupted);
    const int32_t result = functions_.decode(context_, batch);
    functions_.synchronize(context_);
    is_interrupted_ = nullptr;
    seconds_ += std::chrono::duration<double>(Clock::now() - start).count();
    if (result != 0) return result;
    const int32_t * tokens = tokens_.data();
    for (const Part & part : parts_) {
        part.held->cells.insert(part.held->cells.end(), tokens, tokens + part.n_tokens);
        part.held->is_clean = true;
        part.held->n_droppable = static_cast<int32_t>(std::min(n_rollback_, part.n_tokens - 1));
        tokens += part.n_tokens;
    }
    return 0;
}

const float * Context::logits(int32_t i) const { return functions_.get_logits_ith(context_, i); }

}  // namespace ggufspec
