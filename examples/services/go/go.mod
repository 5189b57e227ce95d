module example.com/orders

go 1.25

require github.com/lib/pq v1.12.3
