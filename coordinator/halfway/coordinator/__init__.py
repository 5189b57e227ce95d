"""The protocol of halfway, and the ports that it needs.

The folders import downwards only: cluster, checkback, prepare and resolve, query, shards, access and activity,
records.
"""
