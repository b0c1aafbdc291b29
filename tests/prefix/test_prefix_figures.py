from jaxspec.prefix.page_pool import PrefixMetrics


def test_tokens_are_counted_as_looked_up_found_and_found_without_a_state():
    figures = PrefixMetrics()
    figures.of_request(30, num_cached=16, num_matched=24)
    figures.of_request(20, num_cached=19, num_matched=16)  # behind a partly filled page
    figures.skipped["no slot"] += 1
    told = figures.told()
    assert (told["num_queries"], told["num_hits"], told["num_without_state"]) == (50, 35, 8)
    assert told["skipped"] == {"no slot": 1} and told["skipped"] is not figures.skipped
