"""What is published loads: configs of checkpoints on the hub, as their publishers wrote them."""

from tests.support.published import expand, records

RECORDS = records()


def test_each_record_says_what_it_is_of_and_where_it_was_seen() -> None:
    names = [record.name for record in RECORDS]
    assert len(set(names)) == len(names) >= 120
    for record in RECORDS:
        assert record.name.count("/") == 1, record.name
        assert record.source, record.name
        assert record.config["model_type"], record.name


def test_short_forms_are_written_out() -> None:
    assert expand({"cycle": ["a", "b"], "length": 5}) == ["a", "b", "a", "b", "a"]
    assert expand([{"runs": [["a", 2], ["b", 1]]}]) == [["a", "a", "b"]]
    assert expand({"x": {"numbered": ["y", "l.{0-1,3}.z"]}}) == {"x": ["y", "l.0.z", "l.1.z", "l.3.z"]}
    assert expand({"numbered": {"l.{7,9}": {"n": 1}}}) == {"l.7": {"n": 1}, "l.9": {"n": 1}}
