"""Records of statistics, histories and jobs, and the calls between instances. Imports only `requests`."""
