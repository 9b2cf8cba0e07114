"""What is said of the weights of running instances."""

from cleave.rpc.weights_report import WeightsReport, explain_weights, find_latest, merge_weights

P, D = WeightsReport("chat-p-0", "a1", 100.0), WeightsReport("chat-d-0", "b2", 200.9)
NOTHING = WeightsReport("chat-gateway-0", "", 0.0)


def test_equal_weights_need_no_word() -> None:
    assert explain_weights([]) == explain_weights([NOTHING]) == explain_weights([P, NOTHING]) == ""
    assert explain_weights([P, WeightsReport("chat-d-0", "a1", 300.0)]) == ""


def test_the_instances_that_did_not_read_last_are_named() -> None:
    assert explain_weights([P, D, NOTHING]) == (
        "1 of 2 instances have loaded other weights than b2, which were read last, at "
        "1970-01-01T00:03:20Z, and exchange no KV with the others: chat-p-0 (a1)"
    )
    many = [WeightsReport(f"p-{number}", "a1", 1.0) for number in range(9)]
    assert explain_weights([*many, D]).endswith("p-0 (a1), p-1 (a1), p-2 (a1) and 6 more")


def test_a_pod_with_engines_that_differ_has_not_what_its_last_one_has() -> None:
    cell = WeightsReport("cell-0", "a1.b2", 300.0)
    assert find_latest([cell, D]) == cell
    assert cell.newest == "b2"
    assert "than b2, which were read last, at 1970-01-01T00:05:00Z" in explain_weights([cell, D])


def test_a_pod_has_the_oldest_and_the_newest_weights_of_its_engines() -> None:
    assert merge_weights([(1.0, "a1"), (2.0, "a1")]) == "a1"
    assert merge_weights([(3.0, "b2"), (1.0, "a1"), (2.0, "c3")]) == "a1.b2"
    assert merge_weights([(1.0, "b2"), (2.0, "a1"), (3.0, "b2")]) == "a1.b2"


def test_what_is_not_known_is_said_unless_something_is_known_to_differ() -> None:
    unknown = WeightsReport("chat-m-0", "c3", 900.0, "the content of s3://b is not known to Cleave")
    assert explain_weights([unknown]) == (
        "whether instances have loaded the same weights is not known: "
        "the content of s3://b is not known to Cleave"
    )
    assert explain_weights([P, unknown]) == explain_weights([unknown])
    assert explain_weights([P, D, unknown]) == explain_weights([P, D])
