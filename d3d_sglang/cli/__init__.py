"""The `d3d` console command."""
