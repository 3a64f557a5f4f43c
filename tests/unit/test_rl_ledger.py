"""Jobs and staleness, without processes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.errors import ProtocolError
from weft.rl.run.coordinator import share
from weft.rl.run.ledger import Ledger
from weft.rl.run.messages import Samples, pack, unpack


def samples(version: int, count: int = 4, first: int = 0) -> Samples:
    column = np.arange(first, first + count)[:, None]
    versions = np.full((count, 1), version)
    return Samples(
        prompts=pack(column), answers=pack(column), rewards=pack(column), logprobs=pack(column), versions=pack(versions)
    )


def ledger(**options) -> Ledger:
    return Ledger(**({"batch_size": 8, "num_jobs": 2, "staleness": 1, "seed": 0, "num_batches": 100} | options))


def test_an_engine_without_weights_gets_nothing():
    assert ledger().next_job(engine=0, version=-1) is None


def test_engines_wait_rather_than_make_samples_that_would_be_too_old():
    books = ledger()
    given = [books.next_job(engine=0, version=0) for _ in range(5)]
    assert [job is not None for job in given] == [True, True, True, True, False]
    assert books.next_job(engine=0, version=1) is not None


def test_no_schedule_of_engines_and_updates_makes_a_sample_too_old():
    rng = random.Random(0)
    for staleness in (0, 1, 3):
        books, version, trained, working = ledger(staleness=staleness, num_batches=20), 0, 0, {}
        ages = []
        for _ in range(20_000):
            if trained == 20:
                break
            engine = rng.randrange(3)
            if engine in working:
                job, made_by = working.pop(engine)
                books.made(job.job, samples(made_by, job.count))
            elif (job := books.next_job(engine=engine, version=version)) is not None:
                working[engine] = job, version
            if books.is_whole(trained):
                oldest = min(int(unpack(part.versions).min()) for part in books.batch(trained))
                ages.append(trained - oldest)
                books.finished(trained)
                trained += 1
            version = max(version, rng.randint(max(0, trained - 1), trained))
        assert trained == 20
        assert max(ages) <= staleness
        assert staleness == 0 or max(ages) > 0


def test_engines_that_are_never_updated_still_do_not_run_away():
    books = ledger(staleness=None)
    while books.next_job(engine=0, version=0) is not None:
        pass
    assert books._next_batch == 4  # of batches 0, 1 and 2 all jobs are given; 3 must wait
    books.trained = 1
    assert books.next_job(engine=0, version=0) is not None


def test_jobs_of_a_lost_engine_come_back_first_and_make_the_same_prompts():
    books = ledger()
    mine, other = books.next_job(engine=0, version=0), books.next_job(engine=1, version=0)
    assert books.lost(0) == 1
    again = books.next_job(engine=1, version=0)
    assert again == mine
    assert books.made(mine.job, samples(0)) is None  # one of two
    assert books.made(mine.job, samples(0)) is None  # nobody waits for it twice
    assert books.made(other.job, samples(0)) == 0


def test_a_resumed_run_begins_with_its_own_batch():
    books = ledger()
    books.next_job(engine=0, version=-1)
    books.start_at(7)
    job = books.next_job(engine=0, version=7)
    assert job is not None
    assert job.job == 14
    books.start_at(0)  # another member says hello
    assert books.next_job(engine=0, version=7).job == 15


def test_jobs_of_different_batches_have_different_seeds():
    books = ledger(staleness=50)
    seeds = [books.next_job(engine=0, version=0).seed for _ in range(80)]
    assert len(set(seeds)) == 80


def test_trainers_share_a_batch_without_overlap():
    batch = [samples(0, 3, 0), samples(1, 5, 3)]
    mine = [unpack(share(batch, rank, 2).answers).ravel().tolist() for rank in range(2)]
    assert mine == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ProtocolError):
        share(batch, 0, 3)
