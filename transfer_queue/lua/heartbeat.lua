-- needs: run, full
-- ARGV: server id, packed info, time to live in ms. Servers that have been silent for longer are forgotten.
call('HSET', key('servers'), ARGV[1], ARGV[2])
call('ZADD', key('servers_until'), now_ms() + tonumber(ARGV[3]), ARGV[1])
for _, silent in ipairs(call('ZRANGEBYSCORE', key('servers_until'), '-inf', now_ms())) do
  call('HDEL', key('servers'), silent)
  call('ZREM', key('servers_until'), silent)
end
return 1
