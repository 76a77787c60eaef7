// The part of ggml's internal structures that the kernels use, since llama-cpp-python includes no headers.
//
// These structures equal those in ggml.h, ggml-backend-impl.h, ggml-cpu-impl.h and ggml-cpu/traits.h of the llama.cpp in
// llama-cpp-python 0.3.36 (ggml 0.25). ggml_layout.py compares them with those of the loaded library; kernels.py tries the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ggufspec::ggml {

constexpr int kMulMat = 29, kMulMatId = 30, kFlashAttnExt = 74;  // enum ggml_op
constexpr int kF32 = 0, kF16 = 1, kQ8_0 = 8, kBF16 = 30;  // enum ggml_type

struct Buffer;
struct BufferType;

struct Tensor {
    int type;
    Buffer * buffer;
    int64_t ne[4];
    size_t nb[4];
    int op;
    int32_t op_params[16];
    int32_t flags;
    Tensor * src[10];
    Tensor * view_src;
    size_t view_offs;
    void * data;
    char name[64];
    void * extra;
    char padding[8];
};

struct ComputeParams {
    int ith, nth;
    size_t wsize;
    void * wdata;
    void * threadpool;
    bool use_ref;
};

struct BufferType {
    const char * (*get_name)(BufferType *);
    Buffer * (*alloc_buffer)(BufferType *, size_t);
    size_t (*get_alignment)(BufferType *);
    size_t (*get_max_size)(BufferType *);
    size_t (*get_alloc_size)(BufferType *, const Tensor *);
    bool (*is_host)(BufferType *);
    void * device;
    void * context;  // ExtraBufferType
};

struct Buffer {
    void (*free_buffer)(Buffer *);
    void * (*get_base)(Buffer *);
    int (*init_tensor)(Buffer *, Tensor *);
    void (*memset_tensor)(Buffer *, Tensor *, uint8_t, size_t, size_t);
    void (*set_tensor)(Buffer *, Tensor *, const void *, size_t, size_t);
    void (*get_tensor)(Buffer *, const Tensor *, void *, size_t, size_t);
    void (*set_tensor_2d)(Buffer *, Tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d)(Buffer *, const Tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor)(Buffer *, const Tensor *, Tensor *);
    void (*clear)(Buffer *, uint8_t);
    void (*reset)(Buffer *);
    BufferType * type;
    void * context;
    size_t size;
    int usage;
};

// Virtual functions in ggml's order.
class TensorTraits {
public:
    virtual ~TensorTraits() = default;
    virtual bool work_size(int n_threads, const Tensor * op, size_t & size) = 0;
    virtual bool compute_forward(ComputeParams * params, Tensor * op) = 0;
};

class ExtraBufferType {
public:
    virtual ~ExtraBufferType() = default;
    virtual bool supports_op(void * device, const Tensor * op) = 0;
    virtual TensorTraits * get_tensor_traits(const Tensor * op) = 0;
};

// Addresses in the loaded libraries.
struct Functions {
    std::vector<BufferType *> & (*ggml_backend_cpu_get_extra_buffer_types)();
    void (*ggml_barrier)(void * threadpool);
    void (*ggml_threadpool_chunk_set)(void * threadpool, int value);
    int (*ggml_threadpool_chunk_add)(void * threadpool, int value);
    BufferType * (*ggml_backend_cpu_buffer_type)();
    Buffer * (*ggml_backend_buft_alloc_buffer)(BufferType *, size_t);
    bool (*ggml_backend_buft_is_host)(BufferType *);
};

}  // namespace ggufspec::ggml
