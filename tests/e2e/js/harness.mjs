// What the tests share: sandboxes that are gone after the test, and waiting with a bound.
import { after } from 'node:test'
import { setTimeout as pause } from 'node:timers/promises'

for (const name of ['SANDHOLD_URL', 'E2B_API_URL', 'E2B_API_KEY']) {
  if (!process.env[name]) throw new Error(`${name} is not set; run me by scripts/with-server`)
}

/** Makes sandboxes of a class; all are killed after the file's tests. */
export function maker(cls, template) {
  const made = []
  after(() => Promise.all(made.map((sandbox) => sandbox.kill())))
  return async (options = {}) => {
    const sandbox = await cls.create(template, { timeoutMs: 300_000, ...options })
    made.push(sandbox)
    return sandbox
  }
}

/** Waits until `check` gives something true and returns it; throws after `withinMs`. */
export async function eventually(check, withinMs = 15_000) {
  const end = Date.now() + withinMs
  for (;;) {
    const value = await check()
    if (value) return value
    if (Date.now() > end) throw new Error(`not so within ${withinMs} ms: ${check}`)
    await pause(50)
  }
}
