-- ARGV: lane. Everything of it goes; a worker that still runs one of its episodes loses its lease.
local lane = ARGV[1]
for _, task in ipairs(redis.call('HKEYS', P .. ':tasks')) do
  local name = task .. '#0'
  local e = fields(episode_key(name))
  if e.lane == lane then
    if e.state == 'completed' then discard_payload(name, e) end
    redis.call('ZREM', P .. ':leases', name)
    redis.call('HDEL', P .. ':tasks', task)
    redis.call('HDEL', P .. ':dead', name)
    redis.call('DEL', episode_key(name), journal_key(name), P .. ':deadjournal:' .. name)
  end
end
redis.call('DEL', P .. ':lane:' .. lane, P .. ':results:' .. lane, P .. ':out:' .. lane)
redis.call('SREM', P .. ':lanes', lane)
return 1
