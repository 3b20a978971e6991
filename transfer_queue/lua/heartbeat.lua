-- needs: run, full
-- ARGV: server id, packed info, time to live in ms.
call('HSET', key('servers'), ARGV[1], ARGV[2])
call('ZADD', key('servers_until'), now_ms() + tonumber(ARGV[3]), ARGV[1])
return 1
