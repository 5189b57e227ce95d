"""The page of the job `report`: its plots, and the HTML around them."""
