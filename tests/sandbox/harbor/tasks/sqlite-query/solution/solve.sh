#!/bin/bash
echo 'SELECT name, SUM(price) FROM customer JOIN ordered ON customer.id = ordered.customer GROUP BY name ORDER BY name;' > query.sql
