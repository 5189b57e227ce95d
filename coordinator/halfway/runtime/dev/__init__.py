"""The process `halfway dev`: a broker and a coordinator together, and an endpoint that answers checks."""
