"""The suite is run by test_clients.py, in processes of its own."""

collect_ignore = ["suite"]
