"""The drafter: its folder on disk, its network, its K/V cache and the executor that runs it."""
