"""What halfway does, and the ports it needs.

The folders import downwards only: cluster, jobs, checkback, prepare and resolve, query, shards.
"""
