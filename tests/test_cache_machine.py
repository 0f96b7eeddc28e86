"""Long random histories: alloc, extend, fork, write, free, evict, against a shadow model with tagged contents."""

import os

import pytest
from cache_machine import CacheMachine
from conftest import BACKENDS
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

import pagedkv

STEPS = {"numpy": 4000, "ptx": 2000, "cuda": 2000}  # PAGEDKV_STEPS asks for others
OF_A_HISTORY = 50


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_long_random_histories(backend_name):
    steps = int(os.environ.get("PAGEDKV_STEPS", STEPS[backend_name]))
    machine = type("Machine", (CacheMachine,), {"backend_name": backend_name})
    many = {"max_examples": -(-steps // OF_A_HISTORY), "stateful_step_count": OF_A_HISTORY}
    options = settings(**many, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    end = CacheMachine.num_steps[backend_name] + steps
    with pagedkv.use_backend(backend_name):
        while CacheMachine.num_steps[backend_name] < end:  # histories may end early
            run_state_machine_as_test(machine, settings=options)
