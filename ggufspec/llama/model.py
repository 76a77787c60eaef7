"""A loaded GGUF model; refuses files that are not models that write text."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp

from ggufspec.common.failures import closed_on_error
from ggufspec.common.progress import Share
from ggufspec.errors import ClosedError, GgufspecError, ModelError, OptionError, OutOfMemoryError
from ggufspec.llama import kernels
from ggufspec.llama.devices import offload_devices, tensor_overrides
from ggufspec.llama.kernel_offer import Offer, Placed, offer, offered
from ggufspec.llama.log import listening, log
from ggufspec.llama.rpc import RemoteDevice
from ggufspec.llama.vocab import Vocab, meta_text
from ggufspec.models.adapters import Adapters
from ggufspec.models.header import open_gguf
from ggufspec.models.key_overrides import KeyOverrides
from ggufspec.placement.overrides import Overrides

_LOAD_MODES = {  # keys: mmap, mlock
    (False, False): llama_cpp.LLAMA_LOAD_MODE_NONE,
    (True, False): llama_cpp.LLAMA_LOAD_MODE_MMAP,
    (False, True): llama_cpp.LLAMA_LOAD_MODE_MLOCK,
    (True, True): llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK,
}
_KEY_TAGS = {  # per Python type: llama.cpp's tag, and the member of its union
    "int": (llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT, "val_i64"),
    "float": (llama_cpp.LLAMA_KV_OVERRIDE_TYPE_FLOAT, "val_f64"),
    "bool": (llama_cpp.LLAMA_KV_OVERRIDE_TYPE_BOOL, "val_bool"),
    "str": (llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR, "val_str"),
}


class AttentionHeads(NamedTuple):
    """The attention of a layer: query heads, KV heads, and the width of each one's K and V."""

    n: int
    n_kv: int
    n_keys: int
    n_values: int


class Model:
    """A loaded GGUF model. Close it after its contexts."""

    def __init__(
        self,
        path: str | Path,
        *,
        n_gpu_layers: int = -1,
        tensor_split: Sequence[float] = (),
        gpu: int | None = None,
        rpc: Sequence[RemoteDevice] = (),
        mmap: bool = True,
        mlock: bool = False,
        repack: bool = True,
        own_kernels: Collection[str] | None = None,
        mtp: bool = False,
        is_head: bool = False,
        writes_text: bool = True,
        overrides: Overrides = (),
        adapters: Adapters = (),
        key_overrides: KeyOverrides = (),
        progress: Share | None = None,
    ) -> None:
        """Load `path`. n_gpu_layers: negative for all.

        tensor_split: the share of the layers for each GPU; empty: by free memory. gpu: the only GPU
        to use. rpc: devices of servers, which count as GPUs before those of this machine. mtp: load
        the layers of its MTP head too. is_head: the file is only a head for another model.
        writes_text: False: it is only to compute embeddings.
        overrides: tensors that stay on the CPU, or go to another device, whatever their layer does.
        adapters: LoRA adapters, which `with_adapters` has checked; each context applies them.
        key_overrides: values that replace those of its header. mlock: keep it in RAM, as far as the
        limit on locked memory allows. repack: weights may be stored in another form for kernels.
        own_kernels: types of weights that ours compute, where they work; None: all such types.
        progress: called with the share that is loaded, up to 1.

        Raises ModelError for a file that is missing, damaged, or not a model that writes text;
        OptionError for overrides with an unknown buffer type or with patterns that llama.cpp
        refuses, and for variables of the environment with an unknown value.
        """
        kernels.check_variables()
        self.path = Path(path)
        self._n_gpu_layers = n_gpu_layers
        self.rpc = tuple(device.name for device in rpc)
        self._gpu = gpu
        self.tensor_split = tuple(tensor_split)
        with open_gguf(self.path):
            pass  # its errors are clearer than those of llama.cpp
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.load_mode = _LOAD_MODES[mmap, mlock]
        params.use_extra_bufts = self.repack = repack
        self.key_overrides = key_overrides
        if key_overrides:
            self._keys = _key_array(key_overrides)  # llama.cpp keeps its address
            params.kv_overrides = self._keys
        params.load_mtp = mtp
        if tensor_split:
            shares = (ctypes.c_float * int(llama_cpp.llama_max_devices()))(*tensor_split)
            params.tensor_split = shares
        if gpu is not None:
            params.split_mode, params.main_gpu = llama_cpp.LLAMA_SPLIT_MODE_NONE, gpu
        if rpc:
            # llama.cpp's own order, in which activations cross the network least often.
            used = [*(at.pointer for at in rpc), *(at.pointer for at in offload_devices())]
            pointers = (ctypes.c_void_p * (len(used) + 1))(*used, None)
            params.devices = ctypes.cast(pointers, ctypes.c_void_p)
        self.overrides = overrides if self._used_devices() else ()
        if self.overrides:
            # The array is read while the file is loaded; llama.cpp keeps its address.
            self._patterns = tensor_overrides(self.overrides)
            params.tensor_buft_overrides = ctypes.cast(self._patterns, ctypes.c_void_p)
        self.is_head = is_head
        self.kernels = Offer()
        if repack:
            writes = writes_text and not is_head
            self.kernels = offer(self.path, self.placed, writes=writes).only(own_kernels)
        self._pointer: int | None = self._load(params, progress)
        self.vocab = Vocab(self.pointer)
        at = self.pointer
        self.n_params: int = llama_cpp.llama_model_n_params(at)
        self.n_bytes: int = llama_cpp.llama_model_size(at)  # of all tensors
        self.n_layers: int = llama_cpp.llama_model_n_layer(at)
        self.n_ctx_train: int = llama_cpp.llama_model_n_ctx_train(at)  # the context of the training
        self.n_embd: int = llama_cpp.llama_model_n_embd(at)  # the width of its hidden states
        self.n_embd_out: int = llama_cpp.llama_model_n_embd_out(at) or self.n_embd  # of the last
        self.has_windows: bool = llama_cpp.llama_model_n_swa(at) > 0  # sliding ones, in some layers
        n_experts, n_used = (self._number(f"expert_{of}", 0) for of in ("count", "used_count"))
        # Experts per layer, and experts that a token uses; None: not a mixture of experts.
        self.experts = (n_experts, n_used) if 0 < n_used < n_experts else None
        # Whether the cache can drop the end of a sequence; not for recurrent architectures.
        has_state = llama_cpp.llama_model_is_recurrent(at) or llama_cpp.llama_model_is_hybrid(at)
        self.can_drop_tail = not has_state
        self.chat_template = self._template(None)
        self.chat_template_for_tools = self._template(b"tool_use")
        with closed_on_error(self.close):
            if not is_head:
                if writes_text:
                    self._check_writes_text()
                self._check_vocabulary()
            self.adapters = adapters
            self._adapters = load_adapters(self.pointer, adapters)

    def _load(self, params: llama_cpp.llama_model_params, progress: Share | None) -> int:
        raised: list[BaseException] = []

        def on_progress(share: float, _: int | None) -> bool:
            # An exception cannot cross llama.cpp: keep it, and make llama.cpp stop.
            try:
                if progress is not None:
                    progress(share)
            except BaseException as error:
                raised.append(error)
            return not raised and not log.interrupted

        kernels.leave_out_broken_amx()
        callback = llama_cpp.llama_progress_callback(on_progress)
        params.progress_callback = callback
        params.no_host = bool(self.kernels.types)
        with listening():
            llama_cpp.llama_backend_init()
        with offered(self.kernels), listening():
            path = os.fsencode(self.path)
            loaded: int | None = llama_cpp.llama_model_load_from_file(path, params)
            is_stopped = bool(raised) or log.interrupted
            if loaded and is_stopped:
                llama_cpp.llama_model_free(loaded)
        if is_stopped:
            raise raised[0] if raised else KeyboardInterrupt
        if not loaded:
            raise self._load_error(params)
        return loaded

    def _template(self, name: bytes | None) -> str | None:
        """A Jinja template of the file; llama.cpp gives a name instead for a model without one."""
        found: bytes | None = llama_cpp.llama_model_chat_template(self.pointer, name)
        return found.decode("utf-8", "replace") if found and b"{" in found else None

    def _load_error(self, params: llama_cpp.llama_model_params) -> GgufspecError:
        """The error of a failed load: memory, if the file loads without allocation."""

        def loads() -> bool:
            with listening():
                pointer = llama_cpp.llama_model_load_from_file(os.fsencode(self.path), params)
                if pointer:
                    llama_cpp.llama_model_free(pointer)
            return bool(pointer)

        complaints = log.complaints()
        params.no_alloc, params.load_mode = True, llama_cpp.LLAMA_LOAD_MODE_NONE
        if loads():
            return OutOfMemoryError(
                f"there is not enough memory for {self.path}: use fewer GPU layers (n_gpu_layers, "
                f"-ngl) or a smaller model.\n{complaints}"
            )
        params.tensor_buft_overrides = None
        if self.overrides and loads():
            return OptionError(
                f"llama.cpp does not load {self.path} with the tensor overrides "
                f"{','.join(map(str, self.overrides))} (-ot): change their patterns.\n{complaints}"
            )
        params.kv_overrides = None
        if self.key_overrides and loads():
            return OptionError(
                f"llama.cpp does not load {self.path} with the header values "
                f"{','.join(map(str, self.key_overrides))} (--override-kv, --rope-*): leave them "
                f"out, or change them.\n{complaints}"
            )
        return ModelError(
            f"{self.path} could not be loaded: it is damaged, incomplete, or of an architecture "
            f"that this llama.cpp does not support.\n{complaints}"
        )

    def _check_writes_text(self) -> None:
        has_encoder = llama_cpp.llama_model_has_encoder(self.pointer)
        if has_encoder or not llama_cpp.llama_model_has_decoder(self.pointer):
            raise ModelError(
                f"{self.path} is an encoder ({self.description}); "
                "speculative decoding needs a model that only decodes"
            )
        if llama_cpp.llama_model_is_diffusion(self.pointer):
            raise ModelError(
                f"{self.path} is a diffusion model ({self.description}); "
                "speculative decoding needs a model that writes token by token"
            )

    def _check_vocabulary(self) -> None:
        if self.vocab.type == "none":
            raise ModelError(f"{self.path} has no vocabulary: it can neither read nor write text")
        if not self.vocab.has_added_tokens:
            raise ModelError(
                f"{self.path} is damaged: its vocabulary does not have the token that it adds to "
                "the beginning or the end of each text"
            )

    @property
    def pointer(self) -> int:
        """The llama_model pointer. Raises ClosedError after close."""
        if self._pointer is None:
            raise ClosedError(f"the model {self.path} is closed; load it again")
        return self._pointer

    @property
    def description(self) -> str:
        """Architecture, size and quantization, as llama.cpp names them."""
        buffer = ctypes.create_string_buffer(128)
        llama_cpp.llama_model_desc(self.pointer, buffer, 128)
        return buffer.value.decode("utf-8", "replace")

    @property
    def n_ctx_max(self) -> int | None:
        """The number of learned positions, a limit of contexts (GPT-2 ...); None: computed ones."""
        has_rope = llama_cpp.llama_model_rope_type(self.pointer) != llama_cpp.LLAMA_ROPE_TYPE_NONE
        return None if has_rope or not self.can_drop_tail else self.n_ctx_train

    @property
    def attention_heads(self) -> AttentionHeads | None:
        """The attention heads of the first layer; None where few or no layers have attention."""
        n = int(llama_cpp.llama_model_n_head(self.pointer))
        n_kv = int(llama_cpp.llama_model_n_head_kv(self.pointer))
        if not n or not n_kv or not self.can_drop_tail:
            return None
        usual = self.n_embd // n
        k, v = (self._number(f"attention.{of}_length", usual) for of in ("key", "value"))
        return AttentionHeads(n, n_kv, k, v)

    @property
    def n_kv_values(self) -> int:
        """Values for each token in the K and V caches; 0 where `attention_heads` is None."""
        heads = self.attention_heads
        return self.n_layers * heads.n_kv * (heads.n_keys + heads.n_values) if heads else 0

    @property
    def n_gpu_layers(self) -> int:
        """How many of the n_layers + 1 layers (the output counts as one) are for GPUs."""
        n_all = self.n_layers + 1
        if not (self.rpc or offload_devices()):
            return 0
        return min(self._n_gpu_layers, n_all) if self._n_gpu_layers >= 0 else n_all

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices that its layers are on; the CPU has none."""
        return self._used_devices() if self.n_gpu_layers else ()

    def _used_devices(self) -> tuple[str, ...]:
        return usable_devices(self.rpc, self._gpu)

    @property
    def placed(self) -> Placed:
        """Where its layers are, as it was loaded."""
        return Placed(self._used_devices(), self._n_gpu_layers, self.overrides)

    @property
    def places(self) -> frozenset[str]:
        """Where its layers are: its devices, and the CPU if not all are on them."""
        is_whole = self.n_gpu_layers > self.n_layers and not self.overrides
        return frozenset(self.devices if is_whole else (*self.devices, "CPU"))

    def _number(self, key: str, default: int) -> int:
        """A whole number of the file's header, whose key begins with the architecture."""
        name = f"{meta_text(self.pointer, 'general.architecture')}.{key}"
        given = {each.key: str(each.value) for each in self.key_overrides}
        found = given.get(name, meta_text(self.pointer, name))
        return int(found) if found.isdecimal() else default

    def adapt(self, context: int) -> None:
        """Apply its LoRA adapters in all passes of a llama.cpp context of it."""
        if n := len(self.adapters):
            array = (llama_cpp.llama_adapter_lora_p_ctypes * n)(*self._adapters)
            scales = (ctypes.c_float * n)(*(each.scale for each in self.adapters))
            with listening():
                llama_cpp.llama_set_adapters_lora(context, array, n, scales)

    def close(self) -> None:
        """Free the memory. Closing twice is fine."""
        if self._pointer is not None:
            self.vocab.close()
            with listening():
                llama_cpp.llama_model_free(self._pointer)
            self._pointer = None


def usable_devices(rpc: Sequence[str] = (), gpu: int | None = None) -> tuple[str, ...]:
    """Names of the devices that layers can be on: see `rpc` and `gpu` of Model."""
    local = [at.name for at in offload_devices()]
    return (*rpc, *(local if gpu is None else local[gpu : gpu + 1]))


def _key_array(overrides: KeyOverrides) -> Any:
    """The overrides as an array for llama.cpp, which an entry with an empty key ends."""
    array: Any = (llama_cpp.llama_model_kv_override * (len(overrides) + 1))()
    for item, given in zip(array, overrides, strict=False):
        item.tag, member = _KEY_TAGS[given.kind]
        item.key = given.key.encode()
        value = given.value.encode() if isinstance(given.value, str) else given.value
        setattr(item.value, member, value)
    return array


_NO_ROOM = "failed to allocate"  # llama.cpp's words


def load_adapters(model: int, adapters: Adapters) -> list[Any]:
    """Load adapters, which were checked against the model, and return their pointers.

    Call it before contexts are made, which reserve graph nodes for adapters. The adapters are freed
    with the model. Raises ModelError, OutOfMemoryError.
    """
    pointers = []
    for each in adapters:
        with listening() as log:
            pointer = llama_cpp.llama_adapter_lora_init(model, os.fsencode(each.path))
            if not pointer:
                complaints = log.complaints()
                if _NO_ROOM in complaints:
                    raise OutOfMemoryError(
                        f"there is not enough memory for the LoRA adapter {each.path}: use fewer "
                        f"GPU layers (n_gpu_layers, -ngl).\n{complaints}"
                    )
                raise ModelError(
                    f"llama.cpp does not load the LoRA adapter {each.path}; use one that was made "
                    f"for this model.\n{complaints}"
                )
            pointers.append(pointer)
    return pointers
