"""Speculative decoding in JAX: draft, verify, commit, in one jitted loop."""

from specjax.drafting.draft_model import DraftModel
from specjax.drafting.drafter import Drafter
from specjax.drafting.eagle3 import Eagle3
from specjax.drafting.eagle3_config import Eagle3Config
from specjax.drafting.eagle3_drafter import Eagle3Drafter, eagle3_params
from specjax.drafting.heads import FullHead, LowRankHead, ScreenedHead, TrimmedHead
from specjax.drafting.hydra import Hydra, HydraConfig
from specjax.drafting.hydra_drafter import HydraDrafter, hydra_params
from specjax.drafting.medusa import Medusa, MedusaConfig
from specjax.drafting.medusa_drafter import MedusaDrafter, medusa_params
from specjax.drafting.nothing import NoDraft
from specjax.drafting.prompt_lookup import PromptLookup
from specjax.generate import generate, speculative_generate
from specjax.generate_config import GenerateConfig
from specjax.kernel_settings import Kernels
from specjax.model_config import ModelConfig, MoEConfig, RopeConfig
from specjax.models.kv_cache import KVCache
from specjax.models.transformer import Transformer
from specjax.requests import left_align
from specjax.sampling import SamplingParams
from specjax.sparsity.attention_sparsity import Reuse, SparseAttention
from specjax.sparsity.sparse_ffn import SparseFFN
from specjax.sparsity.sparse_moe import SparseMoE
from specjax.sparsity.sparsity_config import SparsityConfig
from specjax.state import Commit, Context, Continuation, Draft, FinishReason, GenerateOutput, PrefillChunk, Verification
from specjax.statistics import Statistics
from specjax.streaming import StreamUpdate, stream_generate
from specjax.two_level.lossless import Lossless
from specjax.verification.block_verification import BlockVerification
from specjax.verification.rejection_sampling import RejectionSampling
from specjax.verification.rule import VerificationRule
from specjax.verification.synthetic_acceptance import SyntheticAcceptance
from specjax.verification.typical_acceptance import TypicalAcceptance

__all__ = [
    "BlockVerification",
    "Commit",
    "Context",
    "Continuation",
    "Draft",
    "DraftModel",
    "Drafter",
    "Eagle3",
    "Eagle3Config",
    "Eagle3Drafter",
    "FinishReason",
    "FullHead",
    "GenerateConfig",
    "GenerateOutput",
    "Hydra",
    "HydraConfig",
    "HydraDrafter",
    "KVCache",
    "Kernels",
    "Lossless",
    "LowRankHead",
    "Medusa",
    "MedusaConfig",
    "MedusaDrafter",
    "MoEConfig",
    "ModelConfig",
    "NoDraft",
    "PrefillChunk",
    "PromptLookup",
    "RejectionSampling",
    "Reuse",
    "RopeConfig",
    "SamplingParams",
    "ScreenedHead",
    "SparseAttention",
    "SparseFFN",
    "SparseMoE",
    "SparsityConfig",
    "Statistics",
    "StreamUpdate",
    "SyntheticAcceptance",
    "Transformer",
    "TrimmedHead",
    "TypicalAcceptance",
    "Verification",
    "VerificationRule",
    "eagle3_params",
    "generate",
    "hydra_params",
    "left_align",
    "medusa_params",
    "speculative_generate",
    "stream_generate",
]
