import numpy as np
import pytest

from cleave.traffic import published
from cleave.traffic.workload import DemandError

TABLE_1 = {
    # name: prompt mean, median, p90; output mean, median, p90 (Vidur, table 1)
    "chat-1m": (686, 417, 1678, 197, 139, 484),
    "arxiv-4k": (2588, 2730, 3702, 291, 167, 372),
    "bwb-4k": (1067, 1037, 1453, 1612, 1601, 2149),
}
MEANS = {
    "sharegpt": (755.5, 200.3),
    "humaneval": (171.3, 98.2),
    "longbench": (1738.3, 90.7),
    "azure-code": (2047.8, 27.9),
    "azure-conversation": (1154.7, 211.1),
}


@pytest.mark.parametrize("name", TABLE_1)
def test_vidurs_workloads_have_the_statistics_of_table_1(name) -> None:
    trace = published.get_workload(name).build_demand().draw(50_000)
    found = [
        figure
        for tokens in (trace.prompt_tokens, trace.output_tokens)
        for figure in (np.mean(tokens), *np.percentile(tokens, [50, 90]))
    ]
    assert found == pytest.approx(TABLE_1[name], rel=0.06)
    assert found[:3] == pytest.approx(TABLE_1[name][:3], rel=0.02)
    assert (trace.prompt_tokens + trace.output_tokens).max() <= 4096


@pytest.mark.parametrize("name", MEANS)
def test_the_others_have_their_published_means(name) -> None:
    demand = published.get_workload(name).build_demand()
    means = (demand.mean_prompt_tokens, demand.mean_output_tokens)
    assert means == pytest.approx(MEANS[name], rel=0.06)


def test_the_median_ratio_of_prompt_to_output_is_near_the_published_one() -> None:
    for name, ratio in (("bwb-4k", 0.65), ("arxiv-4k", 15.7)):
        trace = published.get_workload(name).build_demand().draw(50_000)
        drawn = np.median(trace.prompt_tokens / trace.output_tokens)
        assert drawn == pytest.approx(ratio, rel=0.2)


def test_azures_services_bring_their_own_rate() -> None:
    assert published.get_workload("azure-conversation").build_demand().rate == 5.53
    assert (
        published.get_workload("azure-conversation")
        .build_demand(rate=9, burstiness=0)
        .draw(10)
        .rate
        == 9
    )


def test_every_workload_says_what_is_known_and_what_is_assumed() -> None:
    for workload in published.WORKLOADS:
        assert all((workload.source, workload.published, workload.assumed))
    assert len(set(published.list_names())) == len(published.WORKLOADS)


def test_names_are_found_in_any_case_and_a_wrong_one_is_reported() -> None:
    assert published.get_workload("Chat_1M").name == "chat-1m"
    with pytest.raises(DemandError, match="did you mean longbench"):
        published.get_workload("longbnch")
    with pytest.raises(DemandError, match="there are: chat-1m, arxiv-4k"):
        published.get_workload("x")
