"""A generation on the reference attention exports: no custom call stands in the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from specjax import DraftModel, GenerateConfig, speculative_generate
from tests.helpers import tiny_draft_model, tiny_target


@pytest.mark.full
def test_an_exported_speculative_generation_gives_the_same_tokens():
    target, params = tiny_target()
    model, draft_params = tiny_draft_model()
    config = GenerateConfig(max_new_tokens=12, num_speculative_tokens=2)

    def tokens(params, draft_params, prompts):
        return speculative_generate(target, params, DraftModel(model), draft_params, prompts, config=config).tokens

    prompts = jnp.asarray([[3, 1, 4, 1, 5]], jnp.int32)
    exported = export.export(jax.jit(tokens))(params, draft_params, prompts)
    assert np.asarray(exported.call(params, draft_params, prompts)).tolist() == np.asarray(tokens(params, draft_params, prompts)).tolist()
