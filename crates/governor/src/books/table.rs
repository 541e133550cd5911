//! A map that remembers what was touched.
//!
//! Whoever keeps the books durably writes down what a step changed and nothing else. That a change is
//! noticed must not depend on anybody's care: there is no way to a value that is not noted here.
//!
//! Invariant: whatever differs from before the last [`Table::forget_touches`] is among the touched.
//! Touches are not part of what the table is: two tables with the same entries are equal.

use std::{
    borrow::Borrow,
    collections::{BTreeMap, BTreeSet},
    hash::{Hash, Hasher},
};

/// A map that remembers which of its entries were touched.
#[derive(Debug, Clone)]
pub(super) struct Table<K, V> {
    entries: BTreeMap<K, V>,
    touched: BTreeSet<K>,
}

impl<K: Ord + Clone, V> Table<K, V> {
    /// What was there at the start; nothing of it is touched.
    pub(super) fn of(entries: BTreeMap<K, V>) -> Self {
        Self {
            entries,
            touched: BTreeSet::new(),
        }
    }

    pub(super) fn entries(&self) -> &BTreeMap<K, V> {
        &self.entries
    }

    pub(super) fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.entries.get(key)
    }

    pub(super) fn contains_key(&self, key: &K) -> bool {
        self.entries.contains_key(key)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &V> {
        self.entries.values()
    }

    pub(super) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let value = self.entries.get_mut(key)?;
        self.touched.insert(key.clone());
        Some(value)
    }

    /// The entry, made if there is none.
    pub(super) fn get_or_default(&mut self, key: K) -> &mut V
    where
        V: Default,
    {
        self.touched.insert(key.clone());
        self.entries.entry(key).or_default()
    }

    pub(super) fn insert(&mut self, key: K, value: V) {
        self.touched.insert(key.clone());
        self.entries.insert(key, value);
    }

    pub(super) fn remove(&mut self, key: &K) -> Option<V> {
        let value = self.entries.remove(key)?;
        self.touched.insert(key.clone());
        Some(value)
    }

    /// The entries that were touched, with what they are now; `None` is gone.
    pub(super) fn touched(&self) -> impl Iterator<Item = (&K, Option<&V>)> {
        self.touched.iter().map(|key| (key, self.entries.get(key)))
    }

    pub(super) fn forget_touches(&mut self) {
        self.touched.clear();
    }
}

impl<K: Ord, V: PartialEq> PartialEq for Table<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.entries == other.entries
    }
}

impl<K: Ord, V: Eq> Eq for Table<K, V> {}

impl<K: Hash, V: Hash> Hash for Table<K, V> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.entries.hash(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_a_value_is_noted() {
        let mut table = Table::of(BTreeMap::from([(1, "a"), (2, "b"), (3, "c")]));
        assert_eq!(table.touched().count(), 0);
        *table.get_mut(&1).unwrap() = "changed";
        table.remove(&2);
        table.insert(4, "d");
        table.get_or_default(5);
        assert!(table.get_mut(&9).is_none() && table.remove(&9).is_none());
        let touched: Vec<_> = table.touched().map(|(k, v)| (*k, v.copied())).collect();
        assert_eq!(
            touched,
            [
                (1, Some("changed")),
                (2, None),
                (4, Some("d")),
                (5, Some(""))
            ]
        );
        let before = table.clone();
        table.forget_touches();
        assert_eq!(table.touched().count(), 0);
        assert_eq!(table, before, "touches are not part of what it is");
    }
}
