"""Command line: how fast a model trains, and whether it converges, with each aggregation method and strategy.

python -m tfstyle_dist.compare_aggregation
python -m tfstyle_dist.compare_aggregation my_package.my_module:workload --steps 200 --json out.json --plot out.png
"""
