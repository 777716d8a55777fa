"""Values kept: what to keep and how, the results, their table and report, and files of them."""
