CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE ordered (customer INTEGER, price INTEGER);
INSERT INTO customer VALUES (1, 'Ada'), (2, 'Bob'), (3, 'Cyd');
INSERT INTO ordered VALUES (3, 4), (1, 10), (3, 6), (1, 1);
