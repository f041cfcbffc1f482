"""Settings of the network and its adapters."""
# fmt: off

from dataclasses import dataclass, field

from dapo_jax.gate import TOKENS, Section, setting


@dataclass
class Lora(Section, place="model.lora"):
    """LoRA (arXiv 2106.09685): W + alpha / rank * A B, where only A and B are trained (docs/lora.md)."""

    rank: int = setting(0, "width of the adapters; 0 = none, all weights are trained", 0, 2**14)
    alpha: float = setting(16.0, "the adapters are scaled by alpha / rank", 1e-6, 1e6)
    targets: str = setting("q,k,v,o,gate,up,down", "linear layers of a block that have them")


@dataclass
class Model(Section, place="model"):
    """The network: read from `path`, or of the shape below if path is ''."""

    path: str = setting("", "Hugging Face directory, also in a bucket (gs://...), or hub name of a Qwen2.5 or Qwen3 checkpoint; '' = random weights of the shape below", path=True)
    vocab_size: int = setting(48, "rows of the embedding (Qwen2.5: 151936 or 152064)", 2, 2**24)
    hidden_size: int = setting(64, "width of the residual stream, D", 1, 2**20)
    intermediate_size: int = setting(192, "width of the SwiGLU hidden layer, F", 1, 2**20)
    num_layers: int = setting(2, "decoder blocks, L", 1, 1000)
    num_heads: int = setting(4, "query heads, H", 1, 2**20)
    num_kv_heads: int = setting(2, "key/value heads, K; divides num_heads", 1, 2**20)
    head_dim: int = setting(16, "width of one head, even (RoPE rotates halves)", 2, 2**20)
    rope_theta: float = setting(1e4, "RoPE base (Qwen2.5: 1e6)", 1.0, 1e15)
    rms_eps: float = setting(1e-6, "epsilon inside RMSNorm's square root", 1e-12, 1.0)
    tie_embeddings: bool = setting(True, "the output head is the embedding's transpose")
    qkv_bias: bool = setting(True, "q, k and v have biases (Qwen2.5; Qwen3 has none)")
    qk_norm: bool = setting(False, "an RMSNorm over each head of q and of k (Qwen3)")
    init_std: float = setting(0.25, "std of the random embedding (linear layers: 1/sqrt(fan_in))", 0.0, 1e3)
    dtype: str = setting("float32", "compute dtype; master weights and Adam are float32 (with LoRA those of the adapters, and all other weights have this dtype)", choices=("float32", "bfloat16"))
    scan_layers: bool = setting(False, "training: scan over layers (one compiled body) instead of unrolling them")
    remat: str = setting("none", "what the backward pass recomputes: nothing; norms and elementwise; those and attention; blocks except attention; whole blocks", choices=("none", "dots_attention", "dots", "attention", "full"))
    attention: str = setting("auto", "training attention: splash on TPU, triton or cudnn on GPUs from Ampere on, chunked (XLA) elsewhere; auto = by device", choices=("auto", "chunked", "splash", "cudnn", "triton"))
    attention_chunk: int = setting(512, "queries per step of training attention; bounds its scores to chunk x row", 1, TOKENS)
    head_chunk: int = setting(1024, "tokens per step of the output head; bounds logits to chunk x vocabulary; those of a whole row are not computed again for gradients", 1, TOKENS)
    float32_head: bool = setting(False, "output weights and the products for logits in float32 under a bfloat16 model, in sampler and trainer (ScaleRL, MiniMax-M1); logits are always float32")
    lora: Lora = field(default_factory=Lora)
