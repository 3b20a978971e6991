-- ARGV: server, packed description, ttl in ms.
redis.call('HSET', P .. ':servers', ARGV[1], ARGV[2])
redis.call('ZADD', P .. ':heartbeats', now_ms() + tonumber(ARGV[3]), ARGV[1])
return 1
