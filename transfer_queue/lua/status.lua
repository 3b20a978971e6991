-- One round trip for everything that people and watchdogs ask. Returns flat lists for the client to name.
local workers, lanes = {}, {}
for _, name in ipairs(redis.call('ZRANGE', P .. ':leases', 0, 9999)) do
  workers[#workers + 1] = redis.call('HGET', episode_key(name), 'worker')
end
for _, lane in ipairs(redis.call('SMEMBERS', P .. ':lanes')) do
  lanes[#lanes + 1] = {lane, redis.call('ZCARD', P .. ':lane:' .. lane),
    tonumber(redis.call('HGET', P .. ':out:' .. lane, 'leased') or 0), redis.call('LLEN', P .. ':results:' .. lane)}
end
return {redis.call('HGETALL', META), redis.call('ZCARD', P .. ':queue'), redis.call('ZCARD', P .. ':open'),
  redis.call('ZCARD', P .. ':leases'), workers, redis.call('HGETALL', P .. ':waits'), lanes}
