// Decodes batches and truncates sequences of a llama.cpp context, through the functions of the libllama
// that llama-cpp-python has loaded. llama.cpp is not linked, so one build works with its CPU, CUDA, Metal
// and Vulkan builds. Sequences are numbered from 0.
//
// The end of a batch may be a tree. llama.cpp masks by sequences: each leaf has a separate sequence, a node belongs to the
// sequences of all leaves below it, and its position follows from its depth. The first leaf has the sequence's own id, the
// other leaves have further ids ("branches"), which share the cells of the text before the tree.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

namespace ggufspec {

// struct llama_batch of llama.h, passed by value; Python compares its layout with llama-cpp-python's.
struct Batch {
    int32_t n_tokens;
    int32_t * token;
    float * embd;
    int32_t * pos;
    int32_t * n_seq_id;
    int32_t ** seq_id;
    int8_t * logits;
};

struct Functions {
    int32_t (*decode)(void *, Batch);                      // llama_decode
    void (*synchronize)(void *);                           // llama_synchronize
    float * (*get_logits_ith)(void *, int32_t);            // llama_get_logits_ith
    bool (*seq_rm)(void *, int32_t, int32_t, int32_t);     // llama_memory_seq_rm
    void (*seq_cp)(void *, int32_t, int32_t, int32_t, int32_t);  // llama_memory_seq_cp
    int32_t (*seq_pos_max)(void *, int32_t);               // llama_memory_seq_pos_max
    void (*set_abort_callback)(void *, bool (*)(void *), void *);  // llama_set_abort_callback
};

struct DecodeError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Context {
public:
    // n_leaves: maximum leaves of a tree per sequence; llama.cpp needs n_sequences * n_leaves sequence ids.
    // n_hidden: width of the hidden state that each token of a batch has; 0: none. are_alone: a batch has hidden states
    // instead of tokens; its tokens are then only used to know what is held.
    // n_rollback: see ContextOptions in context_options.py; 0 if llama.cpp itself refuses a tail that it cannot drop.
    // shares_cells: the memory belongs to another context. A batch is then placed after that context's cells, and
    // llama.cpp adds no cells: this object holds the tokens of past batches.
    Context(Functions functions, void * context, void * memory, size_t n_batch, size_t n_sequences, size_t n_leaves,
            size_t n_hidden, bool are_alone, size_t n_rollback, bool shares_cells);
    Context(const Context &) = delete;  // a batch has pointers into this object
    Context & operator=(const Context &) = delete;

    // The length of the longest common prefix of the held tokens and `tokens`, at most n_most. If the last batch had a
    // tree, its path along `tokens` counts.
    size_t n_common(size_t sequence, const int32_t * tokens, size_t n_most) const;

    // Truncates to the longest common prefix with `tokens`, of at most n_most tokens, and drops the other branches of a
    // tree. Returns how many tokens remain, or -1 if this kind of memory cannot drop a tail: restore a checkpoint then.
    int32_t resume(size_t sequence, const int32_t * tokens, size_t n_most);

    // Drops the tokens from position n_tokens on, and all paths of a tree but the first. Returns false if this kind of memory
    // cannot drop a tail.
    bool truncate(size_t sequence, size_t n_tokens);

    // To restore a checkpoint of n_tokens: call begin_restore, llama.cpp's function, and end_restore if it succeeded.
    // In between, the tokens from position n_tokens on count as not held, and no tail can be dropped.
    void begin_restore(size_t sequence, size_t n_tokens);
    void end_restore(size_t sequence) { held_[sequence].n_droppable = 0; }

    // Notes that llama.cpp's function has filled an empty sequence with the cells of these tokens. With a recurrent state,
    // none of them can be dropped until the next batch.
    void hold(size_t sequence, const int32_t * tokens, size_t n_tokens);

    // Replaces a sequence by the longest prefix of `tokens` that `source` holds. The two share cells.
    void copy_prefix(size_t source, size_t sequence, const int32_t * tokens, size_t n_tokens);

    // Drops n_dropped tokens of a sequence after its first n_first tokens; its last token must remain. The tokens after
    // the gap keep their positions, and count as following the first n_first. Not with trees; n_first must be the same in
    // each call, until the sequence is truncated to it. Throws std::invalid_argument.
    void drop_middle(size_t sequence, size_t n_first, size_t n_dropped);

    // A batch: call begin, then add once for each of its sequences, then run. It evaluates the tokens after those that are
    // held, at most n_batch tokens, and keeps logits of the last n_rows of each part. `hidden`: (n_tokens, n_hidden),
    // copied; null for zeros. `parents`: the last n_nodes tokens are a tree; parents[i] is the earlier node that node i
    // follows, -1: the token before the tree. A tree has at most n_leaves leaves, and is held until the next call that
    // changes what this sequence holds.
    // run returns llama_decode's code; an exception of it is thrown as DecodeError. Unless the code is 0, none of the tokens
    // is held. On CPU backends, run calls is_interrupted in this thread about ten times a second, and ends the batch if it
    // returns true.
    void begin();
    void add(size_t sequence, const int32_t * tokens, size_t n_tokens, size_t n_rows, const float * hidden = nullptr,
             const int32_t * parents = nullptr, size_t n_nodes = 0);
    int32_t run(std::function<bool()> is_interrupted);

    // As begin, add and run, for an image: `embeddings` (n_tokens, width) instead of the tokens, which name its cells: see
    // images.h. `offsets` (n_dimensions, n_tokens): positions after the position of its first cell. Without logits; in several
    // batches if it is longer than one.
    int32_t run_image(size_t sequence, const int32_t * tokens, size_t n_tokens, const float * embeddings, size_t width,
                      const int32_t * offsets, size_t n_dimensions, std::function<bool()> is_interrupted);

    // From any thread: true ends the batch in progress (on CPU backends), and each later one at once, until it is false.
    // run then returns kStopped.
    void stop(bool is_stopped) { is_stopped_ = is_stopped; }
    bool is_stopped() const { return is_stopped_; }
    static constexpr int32_t kStopped = 2;  // llama_decode's code for an aborted batch

    // The logits of token i of the last batch; null if llama.cpp did not keep them.
    const float * logits(int32_t i) const;

    // Whether texts may have images. If not, they are not searched for them.
    bool has_images = false;

    // Whether batches use the attention kernels: see native/attention. At first, they do not.
    bool uses_attention = false;

    // Whether the kernels computed all attention of the last batch.
    bool has_own_attention() const { return has_own_attention_; }

    // Wall time inside llama_decode so far. From any thread.
    double decode_seconds() const { return seconds_; }
    size_t n_batch() const { return tokens_.size(); }
    size_t n_sequences() const { return held_.size(); }
    size_t n_leaves() const { return n_leaves_; }
    size_t n_hidden() const { return n_hidden_; }
    size_t n_cells(size_t sequence) const { return held_[sequence].cells.size(); }
    const std::vector<int32_t> & cells(size_t sequence) const { return held_[sequence].cells; }

private:
    struct Branch {
        int32_t id;
        size_t n_shared = 0;   // number of first cells of its sequence that it holds
        bool is_clean = true;  // false: llama.cpp may hold more
    };
    // A tree after the first n_before cells; its first path is in the cells, too.
    struct Tree {
        size_t n_before = 0;
        std::vector<int32_t> tokens, parents;
        std::vector<int32_t> branches;  // branch of the first leaf below each node; -1: the sequence's own id
        std::vector<int32_t> ends;      // the leaf of each branch
        bool is_there() const { return !ends.empty(); }  // a chain is stored in cells only
        // The nodes along the first n_most tokens, if `tokens` begins with the cells before the tree.
        std::vector<int32_t> path(const std::vector<int32_t> & cells, const int32_t * tokens, size_t n_most) const;
    };
    struct Held {
        int32_t id;
        std::vector<int32_t> cells;  // the tokens that the sequence holds; llama.cpp may hold more of them
        std::vector<Branch> branches;
        Tree tree;
        std::vector<int32_t> ids;    // for the tree in the batch in progress: ids of all its leaves, then of each node
        bool is_clean = true;        // false: llama.cpp may hold more, after a failure or a refused truncation
        size_t n_first = 0, n_gap = 0;  // n_gap positions after the first n_first have no cells
        int32_t n_droppable = 0;     // with n_rollback: tokens whose states are kept; -1: the state does not match the cells
    };
    // The position of cell i, which may be behind the last one.
    int32_t position(const Held & held, size_t i) const;
    struct Part {
        Held * held;
        size_t n_tokens;
    };

    // Truncate the branches of a sequence to the cells that they share with its first n_tokens cells.
    void cut_branches(Held & held, size_t n_tokens);
    // Make the tree's path along `tokens` the cells, and truncate the branches to what they share with it.
    void choose_path(Held & held, const int32_t * tokens, size_t n_most);
    // Set sequences and positions of the last n_nodes of the batch, which are a tree after n_lead tokens.
    void add_tree(Held & held, size_t n_lead, const int32_t * parents, size_t n_nodes);

    static bool aborts(void * self);

    // llama_decode's code; an exception of it is kept in `thrown`.
    int32_t compute(const Batch & batch, std::optional<DecodeError> & thrown);

    using Clock = std::chrono::steady_clock;

    Functions functions_;
    void * context_;
    void * memory_;
    size_t n_leaves_;
    size_t n_rollback_;
    bool shares_cells_;
    std::vector<Held> held_;
    std::vector<Part> parts_;
    size_t n_added_ = 0;
    std::vector<int32_t> tokens_, positions_, n_sequences_;
    std::vector<int32_t> texts_;  // as tokens_, but with the cells of images, which a head reads as token 0
    std::vector<int32_t *> sequences_;
    std::vector<int8_t> wanted_;
    size_t n_hidden_;
    bool are_alone_, has_hidden_ = false;  // has_hidden_: the batch in progress, if they are alone
    std::vector<float> hidden_;
    std::atomic<double> seconds_{0};  // only the thread that decodes changes it
    std::atomic<bool> is_stopped_{false};
    std::function<bool()> is_interrupted_;  // of the batch in progress; may be empty
    Clock::time_point next_check_;
    size_t n_nodes_ = 0;  // computed so far
    bool has_own_attention_ = false;
};

// Runs the batches of two contexts at the same time, the second one in another thread. Returns both codes. is_interrupted
// is called in this thread and, on CPU backends, ends both.
std::pair<int32_t, int32_t> run_beside(Context & first, Context & second, const std::function<bool()> & is_interrupted);

}  // namespace ggufspec
